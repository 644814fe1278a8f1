"""Fixtures that several test files share."""

import pytest

import pageskip_lib  # noqa: F401  (before anything imports triton: it sets the interpreter switch)


@pytest.fixture(scope="session")
def device():
    """Where the kernels of this run live: compiled on "cuda", interpreted on "cpu"."""
    return pageskip_lib.runtime.default_device()


@pytest.fixture(scope="session")
def smollm():
    """(model, tokenizer): the embedded model on the CPU in fp32, fetched if it is not there yet."""
    return pageskip_lib.load_model(device="cpu")


@pytest.fixture(scope="session")
def qwen_directory(tmp_path_factory):
    """A saved model with the attention of DeepSeek-R1-Distill-Qwen-1.5B: 12 query heads, 2 KV heads, D = 128, biases; random and small elsewhere.

    Its config has no head_dim, as Qwen2's has none: the hidden size, 1536, says it. The tokenizer knows bytes and a few merges.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from pageskip_lib.quality.needle import haystack

    directory = tmp_path_factory.mktemp("qwen")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([haystack("jargon")[:20_000]], trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    config = Qwen2Config(
        vocab_size=384, hidden_size=1536, intermediate_size=64, num_hidden_layers=3, num_attention_heads=12, num_key_value_heads=2,
        max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # they start at 0, where a lost bias would not show
        elif "_proj" in name or "embed" in name:
            parameter.data *= 4  # sharper attention and logits, so that a wrong key changes the tokens
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def qwen(qwen_directory):
    """(model, tokenizer) of ``qwen_directory``, on the CPU in fp32, loaded as any model is: by its name."""
    return pageskip_lib.load_model(str(qwen_directory), device="cpu")
