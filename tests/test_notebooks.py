"""Every notebook runs from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Path:
    """What one notebook has compiled, the next need not."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_runs(path, monkeypatch, compiled):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert any(cell.get("outputs") for cell in notebook.cells)
