"""Every launch must fit the readers' cards: both kernels are compiled for RTX 30, 40 and 50 and for Hopper, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pageskip_lib import runtime


@pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton is not installed")
def test_launches_fit_the_shared_memory_of_consumer_cards():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_for_cards.py"
    ended = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    launches = [json.loads(line) for line in ended.stdout.splitlines()]
    assert {launch["capability"] for launch in launches} == {86, 89, 90, 120} and len(launches) == 24
    for launch in launches:
        assert launch["shared"] <= launch["room"], launch
    # Loads stay in flight: two stages at least, three for fp16 with D = 128 on 99 KB.
    assert all(launch["stages"] >= 2 for launch in launches)
    assert all(launch["stages"] >= 3 for launch in launches if launch["dim"] == 128)
