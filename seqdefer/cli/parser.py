"""The parser of commands: argparse without abbreviations, with suggestions and two lengths of help.

`--help` lists the usual options, `--help-all` all of them; `keep_for_help_all` is told which are not usual. Frameworks
that build parsers from dataclasses (tyro, cyclopts, typer) take a tenth of a second to import, as long as all of
`seqdefer --help` may take. Completions are written once by `shtab`, which reads parsers like this one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from seqdefer.errors import OptionError, suggestion

HELP_ALL = "--help-all"
ASK_FOR_PARSER = "\0parser"  # the one argument that no shell can pass on


class ParserFound(Exception):
    """The answer to ASK_FOR_PARSER: the parser that would have read the arguments."""

    def __init__(self, parser: Parser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations that raises OptionError."""

    def __init__(self, **options: Any) -> None:
        if "\n" in (options.get("epilog") or ""):  # examples keep their lines
            options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, **options})
        self._rare: list[argparse.Action] = []

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see: {self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        if args == [ASK_FOR_PARSER]:
            raise ParserFound(self)
        is_list = any(action.nargs == "*" and not action.option_strings for action in self._actions)
        # argparse ends a list of arguments at the first option: `generate DIR --budget 0.2 INPUT` would not be read.
        chosen, unread = (self.parse_known_intermixed_args if is_list else self.parse_known_args)(args, namespace)
        if unread:
            known = {flag for parser in with_actions(self) for flag in parser._option_string_actions}
            words = suggestion(unread[0].partition("=")[0], known)
            self.error(f"unrecognized arguments: {' '.join(unread)}{words}")
        return chosen

    def keep_for_help_all(self, options: Iterable[argparse.Action]) -> None:
        """Leave options out of --help; --help-all, which this adds, lists them too."""
        rare = list(options)
        if rare and not self._rare:
            words = "list all options and exit; this list has the usual ones"
            self.add_argument(HELP_ALL, action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help=words)
        self._rare += rare

    def format_help(self) -> str:
        with _hidden(self._rare):
            return super().format_help()

    def format_full_help(self) -> str:
        """Return the help with all options."""
        return super().format_help()


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser._print_message(parser.format_full_help(), sys.stdout)
        parser.exit()


@contextmanager
def _hidden(options: Sequence[argparse.Action]) -> Iterator[None]:
    words = [option.help for option in options]
    for option in options:
        option.help = argparse.SUPPRESS
    try:
        yield
    finally:
        for option, text in zip(options, words, strict=True):
            option.help = text


def with_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its actions (`seqdefer cache ls`)."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from with_actions(inner)
