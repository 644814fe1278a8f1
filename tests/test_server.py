"""transformers' server: the models that it loads answer through pageskip, over its engine, and for real over HTTP where it is installed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_live_model import MODELS, make
from test_serving import FEW_EXACT, alone, options, prompts
from transformers.cli import transformers as command
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import CBGenerateManager

from pageskip_lib import models, server
from pageskip_lib.quality.needle import haystack, is_right, plant


def test_a_loaded_model_answers_the_servers_engine_through_the_policy(device, monkeypatch):
    """Everything of the server but HTTP and loading: its manager makes the engine, from the model that it was handed."""
    model = make(*MODELS["llama"](), device)
    monkeypatch.setattr(ModelManager, "load_model_and_processor", lambda self, name: (model, name))
    before, loaders = model.config._attn_implementation, ModelManager.load_model_and_processor
    with server.every_loaded_model(FEW_EXACT) as inside:
        for _ in range(2):  # the second time out of the server's own cache
            assert ModelManager.load_model_and_processor(None, "a name") == (model, "a name")
        assert list(inside) == [model]
        given, (ids,) = options(), prompts(120)
        engine = CBGenerateManager(given["continuous_batching_config"])
        engine.init_cb(model, given["generation_config"])
        engine._cb.add_request(ids, max_new_tokens=20)
        result = engine._cb.get_result(timeout=60)
        engine.stop()
    assert result.error is None
    assert ModelManager.load_model_and_processor is loaders and model.config._attn_implementation == before
    assert result.generated_tokens == alone(model, ids, FEW_EXACT)


def test_the_command_hands_on_what_is_not_its_own(monkeypatch):
    seen, load = [], ModelManager.load_model_and_processor
    monkeypatch.setattr(command, "app", lambda arguments: seen.append((arguments, ModelManager.load_model_and_processor is load)))
    server.main(["a/model", "--budget", "512", "--port", "80", "--page-size", "32"])
    assert seen == [(["serve", "--continuous-batching", "a/model", "--port", "80"], False)]


def test_a_budget_below_its_forced_pages(capsys):
    with pytest.raises(SystemExit):
        server.main(["a/model", "--budget", "16"])
    assert "below its forced pages" in capsys.readouterr().err


def test_over_http(smollm):
    for package in ("fastapi", "uvicorn", "openai", "accelerate"):
        pytest.importorskip(package, reason="transformers' server is not installed")
    _, tokenizer = smollm
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    name, codes = str(models._embedded_directory()), ("7491", "2856")
    sizes = "--device cpu --dtype float32 --cb-num-blocks 24 --cb-max-batch-tokens 512 --cb-max-memory-percent 0.5".split()
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    process = subprocess.Popen([sys.executable, "-m", "pageskip_lib.server", name, "--budget", "256", "--port", str(port), *sizes], env=environment)

    def answer(seed):
        prompt = plant(tokenizer, haystack("transcripts"), context=800, depth=0.3, code=codes[seed], seed=seed)
        body = dict(model=name, prompt=tokenizer.decode(prompt.body + prompt.question), max_tokens=6, temperature=0)
        request = urllib.request.Request(f"http://localhost:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request, timeout=120).read())["choices"][0]["text"]

    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health", timeout=1)
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.5)
        with ThreadPoolExecutor(2) as pool:
            assert [is_right(text, code) for text, code in zip(pool.map(answer, (0, 1)), codes)] == [True, True]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
