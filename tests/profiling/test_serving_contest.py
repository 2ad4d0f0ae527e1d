"""The comparison of servers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.servers import Setting, parse_servers

TOOL = Path(__file__).parents[2] / "tools" / "bench"


def test_our_server_is_measured_beside_the_engine_below_it(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "servers", "--clients", "3", "--answer-tokens", "6", "--rounds", "2"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "server.json").read_text())
    assert list(told["medians"]) == ["library", "server"]
    for name, turns in told["rounds"].items():
        assert len(turns) == 2
        assert all(value > 0 for turn in turns for value in turn.values()), name
    assert "of the library's" in done.stdout


def test_peers_are_named_with_the_python_that_has_them(tmp_path: Path) -> None:
    llama, vllm = parse_servers(["llama-cpp=/opt/python", "vllm"])
    file, folder = tmp_path / "model.gguf", tmp_path
    assert (llama.why_not(file), vllm.why_not(folder)) == ("", "")
    assert "GGUF" in llama.why_not(folder)
    assert "--checkpoint" in vllm.why_not(file)
    command = llama.command(Setting(file, 8, 512, (0, 1)), 1234)
    assert command[0] == "/opt/python"
    assert command[command.index("--n_threads") + 1] == "2"
    assert vllm.command(Setting(folder, 8, 512, (0,)), 1234)[0] == sys.executable
    with pytest.raises(ValueError, match="unknown peer: other; there are llama-cpp, vllm"):
        parse_servers(["other"])
