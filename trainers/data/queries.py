"""Asks a database for rows, through SQLAlchemy. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from trainers.config.mistakes import ConfigError
from trainers.config.remote_data import sqlite_file
from trainers.run.log import without_secrets

_AT_ONCE = 1000  # rows


def lines_of_query(url: str, query: str) -> Iterator[bytes]:
    """The rows of a query as lines of JSON, exactly as the database gives them.

    What the query changes is not kept: nothing is committed, and a SQLite file is opened for reading alone.

    Raises:
        ConfigError: If the database cannot be asked, or if a value is none that JSON has.
    """
    try:
        from sqlalchemy import create_engine, text
    except ImportError:
        raise ConfigError.about("dataset_name", url, "needs SQLAlchemy", "pip install sqlalchemy") from None
    address = url
    if (file := sqlite_file(url)) is not None:
        if not file.is_file():
            remedy = "check the path: sqlite:////data.db is /data.db"
            raise ConfigError.about("dataset_name", url, "names no file", remedy)
        address = f"sqlite:///file:{file}?mode=ro&uri=true"
    try:
        engine = create_engine(address)
        with engine.connect().execution_options(yield_per=_AT_ONCE) as connection:
            result = connection.execute(text(query.replace(":", r"\:")))  # a colon is no parameter
            if not result.returns_rows:
                raise ConfigError.about("dataset_query", query[:80], "gives no rows", "write SELECT ...")
            names = list(result.keys())
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                problem = f"gives the column {repeated[0]!r} twice"
                raise ConfigError.about("dataset_query", query[:80], problem, "name each column once, with AS")
            for number, values in enumerate(result, 1):
                row = dict(zip(names, values, strict=True))
                for name, value in row.items():
                    _refuse_other(query, number, name, value)
                yield json.dumps(row).encode() + b"\n"
        engine.dispose()
    except ConfigError:
        raise
    except Exception as error:  # SQLAlchemy's, or those of the database's driver
        reason = without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0])[:300]
        raise ConfigError.about("dataset_query", query[:80], f"fails: {reason}", "check it, and dataset_name") from None


def _refuse_other(query: str, number: int, name: str, value: Any) -> None:
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return
    kind = f"{value}" if isinstance(value, float) else f"of type {type(value).__name__}"
    problem = f": {name!r} is {kind} in row {number:,}, which JSON does not have"
    remedy = f"leave it out, or write CAST({name} AS TEXT) AS {name}"
    raise ConfigError.about("dataset_query", query[:80], problem, remedy)
