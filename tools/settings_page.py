"""The page of the server's settings, from the fields that are also the options of `seqdefer serve`."""

from __future__ import annotations

from typing import Any

from seqdefer.server.settings import CONFIG, PREFIX, all_settings

HEAD = """\
# Settings of the server

This page is generated. `seqdefer serve DIR` takes every setting as an option, as an environment variable, and as a line
of the TOML file that `--config` or `SEQDEFER_CONFIG` names. The command line wins over the environment, and the
environment over the file. Unknown names and values of another type end the command with an error.

| in the file | option | variable | default | |
|---|---|---|---|---|
"""
EXAMPLE = """
```toml
# serve.toml
host = "0.0.0.0"
keys = "keys.json"
log_format = "json"
request_seconds = 60
```

```sh
SEQDEFER_LOG_LEVEL=debug seqdefer serve models/news --config serve.toml --port 9000
```
"""


def settings_page() -> str:
    """Return a row for each setting."""
    return HEAD + "".join(_row(field) for field, _ in all_settings()) + EXAMPLE


def _row(field: Any) -> str:
    option, variable = f"--{field.name.replace('_', '-')}", f"{PREFIX}{field.name.upper()}"
    assert field.name != CONFIG
    default = (
        ""
        if field.default is None
        else f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
    )
    return f"| `{field.name}` | `{option}` | `{variable}` | {default} | {field.metadata['help']} |\n"
