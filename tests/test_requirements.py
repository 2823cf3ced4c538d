"""What `import moco_d2` says on a machine where a prerequisite is missing or too old."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_without_site_packages(code: str, packages: Path) -> subprocess.CompletedProcess:
    """Run `code` in a Python that sees this project, `packages` and nothing that is installed."""
    env = {**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, env=env, cwd=packages, capture_output=True, text=True)


def write_package(root: Path, name: str, files: dict[str, str] | None = None) -> Path:
    """A package that fails when it is imported: the check must look at files only.

    Args:
        files: path -> comment in it.
    """
    package = root / name
    for file, comment in {"__init__.py": "", **(files or {})}.items():
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"raise AssertionError('imported')  # {comment}\n")
    return package


RECENT = {"config/defaults.py": "REPEAT_SQRT"}


def import_error(packages: Path) -> str:
    """The one line that `import moco_d2` ends with."""
    result = run_without_site_packages("import moco_d2", packages)
    assert result.returncode == 1
    last_line = result.stderr.splitlines()[-1]
    assert last_line.startswith("ImportError: moco_d2 needs ")
    assert "`make setup`" in last_line
    return last_line


def test_missing_torch_is_named_with_the_version_needed(tmp_path):
    write_package(tmp_path, "detectron2", RECENT)
    assert "torch >= 2.3" in import_error(tmp_path)


def test_missing_detectron2_is_named_with_both_ways_to_get_it(tmp_path):
    write_package(tmp_path, "torch")
    message = import_error(tmp_path)
    assert "detectron2, which is not installed" in message
    assert "pip install --no-build-isolation 'git+https" in message


@pytest.mark.parametrize("files", [{}, {"config/defaults.py": "REPEAT_THRESHOLD"}])
def test_an_old_detectron2_is_told_apart_and_located(tmp_path, files):
    write_package(tmp_path, "torch")
    old = write_package(tmp_path, "detectron2", files)
    message = import_error(tmp_path)
    assert "a detectron2 of April 2024 or later" in message
    assert str(old) in message


def test_a_recent_detectron2_passes_without_being_imported(tmp_path):
    write_package(tmp_path, "torch")
    write_package(tmp_path, "detectron2", RECENT)
    code = f"import runpy; runpy.run_path({str(ROOT / 'moco_d2/requirements.py')!r})"
    result = run_without_site_packages(f"{code}['check_requirements'](); print('fine')", tmp_path)
    assert (result.stdout, result.stderr) == ("fine\n", "")
