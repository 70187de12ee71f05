"""`seqdefer serve`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from seqdefer.cli.common import (
    DEFAULTS_NOTE,
    Command,
    Parser,
    add_common,
    add_guarantee,
    chosen_rule,
    given_options,
    override,
)
from seqdefer.cli.progress_bars import show_progress

DESCRIPTION = """\
Answer /v1/completions, /v1/chat/completions and /v1/models like OpenAI,
streams included, at the budget that a request names: model NAME@0.20, or a
field `deferral` with a budget. Also /v1/deferral (what its budgets spend),
/v1/deferral/complete (every token with its author; also for tours),
/v1/deferral/score, /health and /metrics, and a page to try it at /.
Ctrl-C ends it.
"""
EXAMPLES = f"""\
examples:
  seqdefer fit pronounce --out models/pronounce    a first pair, trained in minutes on a CPU
  seqdefer serve models/pronounce                  then open http://127.0.0.1:8000, or in a shell:

  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{{"model": "pronounce@0.20", "prompt": "onomatopoeia"}}'

or with the client of OpenAI (pip install openai):

  from openai import OpenAI

  client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
  answer = client.completions.create(model="pronounce@0.20", prompt="onomatopoeia")
  print(answer.choices[0].text, answer.usage)

  for part in client.completions.create(model="pronounce@0.20", prompt="onomatopoeia", stream=True):
      print(part.choices[0].text, end="", flush=True)

The number after @ is the budget: the share of tokens that the expert writes.
{DEFAULTS_NOTE}
"""
LIMITS = {  # help texts of fields of `Limits`
    "body_bytes": "size of a request, at most",
    "audio_bytes": "size of an upload of sound, at most",
    "request_seconds": "time of a request, at most",
    "inputs": "inputs of a request, at most",
    "queue": "requests that may wait",
    "batch": "sequences written together, at most",
    "running": "sequences in memory, at most",
    "connections": "open connections, at most",
}


def serve(arguments: list[str]) -> int:
    from seqdefer.model.deferring_model import DeferringModel
    from seqdefer.server import serve as server
    from seqdefer.server.http import Limits, check_api_key

    chosen = _parser(Limits()).parse_args(arguments)
    rule = chosen_rule(chosen)
    server.require_extra()
    limits = override(Limits(), given_options(chosen))
    api_key = os.environ.get("SEQDEFER_API_KEY") if chosen.api_key is None else chosen.api_key
    if api_key is not None:
        check_api_key(api_key)  # before the models are loaded
    name = chosen.name or chosen.folder.resolve().name
    with server.listen(chosen.host, chosen.port) as listening:
        with show_progress(quiet=chosen.quiet) as meter:
            model = DeferringModel.from_pretrained(chosen.folder, device=chosen.device, meter=meter)
            model.require_promise(rule)
        address = server.address_of(listening)
        message = f"serving {name} at {address}/v1; open {address} to try it; Ctrl-C ends it"
        if api_key is None and not listening.getsockname()[0].startswith(("127.", "::1")):
            message += "\nwithout an API key: anyone who reaches this machine can use it"

        def announce() -> None:
            print(message, file=sys.stderr, flush=True)

        server.serve(
            model, name, listening,
            limits=limits, api_key=api_key, budget=chosen.budget, host=chosen.host, ready=announce,
        )  # fmt: skip
    return 0


def _parser(limits: object) -> Parser:
    from seqdefer.model.deferring_model import DEFAULT_BUDGET

    parser = Parser(
        prog="seqdefer serve",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of seqdefer fit")
    words = "where to listen (127.0.0.1: this machine only)"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=words)
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (8000)")
    parser.add_argument("--name", metavar="NAME", help="name of the model for clients (the name of the folder)")
    words = f"budget of requests that name none ({DEFAULT_BUDGET})"
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET, metavar="X", help=words)
    add_guarantee(parser, "whatever the calibration promises; serve refuses a model that promises less")
    words = "key that clients must send; SEQDEFER_API_KEY is safer, because lists of processes do not show it (none)"
    parser.add_argument("--api-key", metavar="KEY", help=words)
    for name, words in LIMITS.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(limits, name)
        metavar, shown = ("N", str(default)) if isinstance(default, int) else ("X", f"{default:g}")
        parser.add_argument(flag, type=type(default), metavar=metavar, help=f"{words} ({shown})")
    words = "time of an expert call; then the predictor finishes (half a request's for a remote expert, else no limit)"
    parser.add_argument("--expert-seconds", type=float, metavar="X", help=words)
    add_common(parser)
    return parser


SERVE = Command("serve", "serve a fitted pair through an OpenAI-compatible API", serve)
