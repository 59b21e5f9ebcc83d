"""What a point's name depends on beyond the files that its job names."""

from __future__ import annotations

from pathlib import Path

from autopar.jobs.behind import files_behind


def _written(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".py").write_text(text)


def test_modules_beside_a_file_that_it_imports(tmp_path: Path) -> None:
    """Neighbours it imports, by others, in packages or in a circle count; unused ones and libraries do not."""
    _written(
        tmp_path, model="import torch\nimport blocks\nfrom parts.head import Head\n",
        blocks="from sizes import WIDTH\n", sizes="import model\nWIDTH = 3\n", unused="",
        parts__head="class Head: ...\n",
    )  # fmt: skip
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "tail.py").write_text("")
    found = files_behind(tmp_path / "model.py")
    assert found[0] == tmp_path / "model.py"
    names = {str(path.relative_to(tmp_path)) for path in found}
    assert names == {"model.py", "blocks.py", "sizes.py", "parts/__init__.py", "parts/head.py"}


def test_tables_of_a_cluster_file(tmp_path: Path) -> None:
    """A cluster file's tables of links count with it; a broken file stands for itself."""
    path = tmp_path / "cluster.toml"
    path.write_text('[wires]\nlatency_us = "a.csv"\ngb_per_s = "b.csv"\n')
    assert files_behind(path) == [path, tmp_path / "a.csv", tmp_path / "b.csv"]
    path.write_text("[wires")
    assert files_behind(path) == [path]
