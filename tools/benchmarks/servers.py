"""Our server over HTTP beside the engine below it, and beside other servers, in one run.

    tools/bench servers --model smollm2 --clients 32 --peer llama-cpp=/opt/llama/bin/python --out server

Writes server.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from graphdecode.models import resolve_model_path
from harness import Model, OutFolder, Rounds, medians, record, show, write
from peers.servers import Contest, compare, parse_servers


def main(
    model: Model = "demo",
    clients: Annotated[int, typer.Option(min=1, help="Clients that ask at the same time.")] = 32,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 32,
    rounds: Rounds = 3,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=PYTHON]", help="llama-cpp or vllm, and the Python that has it; may be repeated."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The same model as a folder, for peers that do not read its file.")
    ] = None,
    out: OutFolder = None,
) -> None:
    """Compare our server with the engine below it, and with other servers."""
    contest = Contest(model, resolve_model_path(model), checkpoint, clients, answer_tokens, rounds)
    found = compare(contest, parse_servers(peer or []), lambda: print("measuring", file=sys.stderr, flush=True))
    middle = {name: medians({key: [row[key] for row in rows] for key in rows[0]}) for name, rows in found.items()}
    library = middle["library"]["tokens_per_second"]
    columns = {
        "": "{name}",
        "tokens/s": "{tokens_per_second:.0f}",
        "of the library's": "{share:.2f}",
        "first token, ms": "{first_token_ms:.2f}",
        "over engine's": "{over_engine_ms:.2f}",
        "step, ms": "{step_ms:.2f}",
    }
    shares = {name: figures["tokens_per_second"] / library for name, figures in middle.items()}
    rows = ({"name": name, "share": shares[name]} | figures for name, figures in middle.items())
    show(columns, rows, "servers")
    about = record(schema=1, model=model, clients=clients, answer_tokens=answer_tokens)
    write(out and out / "server.json", about | {"medians": middle, "rounds": found})
