"""`seqdefer serve` and `seqdefer keys`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

from seqdefer.cli import common
from seqdefer.cli.common import Command, Parser
from seqdefer.progress_bars import show_progress

DESCRIPTION = """\
Answer /v1/completions, /v1/chat/completions and /v1/models like OpenAI,
streams included, at the budget that a request names: model NAME@0.20, or a
field `deferral` with a budget. Also /v1/deferral (what its budgets spend),
/v1/deferral/complete (every token with its author; also for tours),
/v1/deferral/score, /live, /ready and /metrics, and a page to try it at /.
Ctrl-C or SIGTERM ends it, after requests in flight.
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

Every option is also a variable (SEQDEFER_PORT for --port) and a line of the
file of --config (port = 8000). The command line wins over variables, and they
over the file. {common.DEFAULTS_NOTE}
"""
KEYS_EXAMPLES = """\
examples:
  seqdefer keys add keys.json alice --requests-per-minute 60 --expert-tokens-per-day 100000
  seqdefer serve models/pronounce --keys keys.json
  seqdefer keys revoke keys.json alice      the server that runs refuses it at once

FILE holds hashes of keys, not the keys.
"""

log = logging.getLogger("seqdefer.server")


def serve(arguments: list[str]) -> int:
    from seqdefer.budgets.caps import allowances
    from seqdefer.budgets.prices import read_prices
    from seqdefer.budgets.rules import check_budget
    from seqdefer.model.deferring_model import DeferringModel
    from seqdefer.model.learning import requested_promises
    from seqdefer.model.served_log import ServedLog
    from seqdefer.server import serve as server
    from seqdefer.server.connections import reserve_descriptors
    from seqdefer.server.keys import KeyRing
    from seqdefer.server.logs import logs_on_stderr
    from seqdefer.server.settings import check_promises, read_settings
    from seqdefer.server.usage import Ledger, usage_file

    chosen = _parser().parse_args(arguments)
    server.require_extra()
    settings, limits = read_settings(common.given_options(chosen), os.environ)
    how: dict[str, Any] = {"confidence": settings.confidence, "share_of": settings.share_of, "within": settings.within}
    promised, quality = requested_promises(settings.guarantee or "nearest", **how)
    caps, prices = common.chosen_caps(settings), None if settings.prices is None else read_prices(settings.prices)
    # These raise what is wrong with options and files before the models are loaded.
    check_budget(settings.budget)
    check_promises(caps, guarantee=settings.guarantee, within=settings.within, served_log=settings.served_log)
    allowances(caps, [], prices)  # a cap in money needs prices
    reserve_descriptors(limits)
    KeyRing(settings.keys, settings.api_key)
    Ledger(settings.usage or (None if settings.keys is None else usage_file(settings.keys)))
    served_log = None if settings.served_log is None else ServedLog(settings.served_log, settings.served_log_mib)
    has_key = settings.api_key is not None or settings.keys is not None
    name, is_quiet = settings.name or chosen.folder.resolve().name, settings.quiet or settings.log_format == "json"
    with (
        logs_on_stderr(settings.log_format, settings.log_level),
        server.listen(settings.host, settings.port) as listening,
    ):
        server.require_key(listening, has_key=has_key, allow_anyone=settings.allow_anyone)
        address = server.address_of(listening)
        with server.answer_probes(listening, limits), show_progress(quiet=is_quiet) as meter:
            pair = {"predictor": chosen.predictor, "expert": chosen.expert}
            model = DeferringModel.from_pretrained(chosen.folder, **pair, device=settings.device, meter=meter)
            model.require_promise(promised)
            if prices is not None:
                model.use_prices(prices)
            found = quality and model.require_quality(quality.within, quality.confidence)
        server.serve(
            model, name, listening, limits=limits, api_key=settings.api_key, keys=settings.keys, usage=settings.usage,
            budget=settings.budget, caps=caps, host=settings.host, served_log=served_log, quality=found,
            ready=lambda: log.info("serving %s at %s/v1; open %s to try it; Ctrl-C ends it", name, address, address),
        )  # fmt: skip
    return 0


def _parser() -> Parser:
    from seqdefer.server.http import Limits
    from seqdefer.server.settings import ServerSettings

    parser = Parser(prog="seqdefer serve", description=DESCRIPTION, epilog=EXAMPLES)
    common.add_model(parser)
    words = "TOML file of settings: the options below, with _ instead of - (none)"
    parser.add_argument("--config", type=Path, metavar="PATH", help=words)
    common.add_options(parser, "server", "serve", ServerSettings())
    parser.keep_for_help_all(common.add_options(parser, "limits", "serve", Limits()))
    return parser


# -- keys ----------------------------------------------------------------------------------------------------------


def keys(arguments: list[str]) -> int:
    words = "Add, list or revoke the API keys of servers."
    parser = Parser(prog="seqdefer keys", description=words, epilog=KEYS_EXAMPLES)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, words, run in (
        ("list", "list keys and their limits, as JSON", _list_keys),
        ("revoke", "remove a key", _revoke_key),
        ("add", "make a key and print it; it cannot be shown again", _add_key),
    ):
        action = actions.add_parser(name, help=words, description=f"{words[:1].upper()}{words[1:]}.")
        action.add_argument("file", type=Path, metavar="FILE", help="file of keys, as for serve --keys")
        if name != "list":
            action.add_argument("name", metavar="NAME", help="name of the key, for people, logs and metrics")
        action.set_defaults(run=run)
    action.add_argument("--requests-per-minute", type=int, metavar="N", help="requests a minute, at most (no limit)")
    words = "tokens of the expert a day (UTC), at most (no limit)"
    action.add_argument("--expert-tokens-per-day", type=int, metavar="N", help=words)
    chosen = parser.parse_args(arguments)
    chosen.run(chosen)
    return 0


def _list_keys(chosen: argparse.Namespace) -> None:
    from seqdefer.server.keys import read_keys

    for key in read_keys(chosen.file):
        print(json.dumps({name: value for name, value in dataclasses.asdict(key).items() if name != "sha256"}))


def _revoke_key(chosen: argparse.Namespace) -> None:
    from seqdefer.server.keys import revoke_key

    revoke_key(chosen.file, chosen.name)


def _add_key(chosen: argparse.Namespace) -> None:
    from seqdefer.server.keys import add_key

    limits = {name: getattr(chosen, name) for name in ("requests_per_minute", "expert_tokens_per_day")}
    print(add_key(chosen.file, chosen.name, **limits))


SERVE = Command("serve", "serve a fitted pair through an OpenAI-compatible API", serve)
KEYS = Command("keys", "add, list and revoke the API keys of servers", keys)
