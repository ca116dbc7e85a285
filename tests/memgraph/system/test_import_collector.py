"""The import of memgraph: no collection of cycles on the way, and the collector as it was afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT = """
import gc, torch
collections = []
gc.callbacks.append(lambda phase, found: collections.append(phase) if found["generation"] == 2 else None)
import memgraph
gc.callbacks.clear()
print(len(collections), gc.isenabled())
"""


@pytest.mark.long
def test_an_import_starts_no_full_collection_and_leaves_the_collector_on() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["0", "True"]
