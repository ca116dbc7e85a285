"""Names of the package are imported when they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import memgraph


def test_to_import_the_package_imports_nothing_else() -> None:
    script = "import sys, torch; known = {*sys.modules}; import memgraph; print({*sys.modules} - known)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "{'memgraph'}\n"


def test_each_public_name_is_there_and_what_type_checkers_read_is_the_same() -> None:
    assert {*memgraph.__all__} <= {*memgraph.MODULES} <= {*dir(memgraph)}
    for name in memgraph.__all__:
        assert getattr(memgraph, name) is getattr(memgraph, name)
    with pytest.raises(AttributeError, match="no attribute 'compil'"):
        _ = memgraph.compil
