"""The set-up of a fresh clone: what `make setup` does and refuses, the lock file, the package."""

import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moco_d2

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text()

# Stands for Python, in the clone's .venv too: answers questions about itself as Python 3.10 would,
# makes environments by copying itself, and notes what it is asked. Fails to install the lock while
# there is a file `broken`.
FAKE_PYTHON = """#!/bin/bash
echo "python $*" >>"$LOG"
case "$*" in
    *"print(os.path.realpath(sys.executable))") echo "$0" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"--requirement requirements.lock"*) [[ ! -e broken ]] ;;
esac
"""
FAKE_UV = """#!/bin/bash
echo "uv $*" >>"$LOG"
case "$1" in
    venv) mkdir -p "${@: -1}/bin" && cp "$PYTHON" "${@: -1}/bin/python" ;;
    python) exit 1 ;;
esac
"""
# Like a version manager's stand-in for a version that is not selected.
NO_PYTHON = "#!/bin/bash\necho 'python3.10: command not found' >&2; exit 127\n"
SYSTEM_TOOLS = ["awk", "bash", "cat", "cp", "dirname", "env", "flock", "head", "mkdir", "mv", "rm"]
SYSTEM_TOOLS += ["tail", "uname"]


class Clone:
    """A copy of the files that set-up reads, and a machine with nothing but the system's tools."""

    def __init__(self, root: Path) -> None:
        self.root = root / "clone with a space"
        self.bin = root / "bin"
        self.log = root / "log"
        self.python = root / "elsewhere" / "python"
        for folder in (self.root / "tools", self.bin, self.python.parent):
            folder.mkdir(parents=True)
        for name in ("requirements.lock", "setup.py", "tools/setup_env.sh"):
            shutil.copy(ROOT / name, self.root / name)
        for name in filter(shutil.which, SYSTEM_TOOLS):
            (self.bin / name).symlink_to(shutil.which(name))
        self.write(self.python, FAKE_PYTHON)

    def write(self, path: Path, script: str) -> None:
        path.unlink(missing_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def setup(self, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        """Run the set-up script; by default with a Python 3.10 named by PYTHON."""
        env = {"PATH": str(self.bin), "LOG": str(self.log), "PYTHON": str(self.python), **env}
        self.log.write_text("")
        command = [self.root / "tools/setup_env.sh", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    def done(self) -> list[str]:
        """What the last set-up had the tools do: make environments, install."""
        doing = re.compile(r"-m venv|uv venv|pip install")
        return [line for line in self.log.read_text().splitlines() if doing.search(line)]


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def refusal(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("moco_d2: ")
    return line


def test_pip_installs_build_tools_then_the_lock_then_the_project(clone):
    assert clone.setup().returncode == 0
    made, tools, lock, project = clone.done()
    assert made == "python -m venv .venv"
    assert "--require-hashes --requirement .venv/build_tools.lock" in tools
    assert "--require-hashes --requirement requirements.lock" in lock
    assert project.endswith("--editable .")
    assert all("--no-deps --no-build-isolation" in line for line in (tools, lock, project))
    built_with = re.findall(r"^(\S+)==", (clone.root / ".venv/build_tools.lock").read_text(), re.M)
    assert built_with == ["packaging", "pip", "setuptools", "wheel"]


def test_uv_is_used_when_it_is_there(clone):
    clone.write(clone.bin / "uv", FAKE_UV)
    assert clone.setup().returncode == 0
    made, *installed = clone.done()
    assert made.startswith("uv venv") and str(clone.python) in made
    assert len(installed) == 3
    assert all(line.startswith("uv pip install --python .venv/bin/python") for line in installed)


def test_nothing_is_installed_again_until_lock_or_package_change(clone):
    clone.setup()
    for name in ("requirements.lock", "setup.py"):
        path = clone.root / name
        os.utime(path)
        assert clone.setup().returncode == 0 and clone.done() == []
        path.write_text(path.read_text() + "# changed\n")
        assert clone.setup().returncode == 0
        assert len(clone.done()) == 3  # into the environment that is there
        clone.setup()
        assert clone.done() == []


def test_an_interrupted_installation_is_begun_anew(clone):
    (clone.root / "broken").touch()
    assert clone.setup().returncode != 0
    assert not any("--editable" in line for line in clone.done())
    (clone.root / ".venv" / "half").touch()
    (clone.root / "broken").unlink()
    assert clone.setup().returncode == 0
    assert len(clone.done()) == 4
    assert not (clone.root / ".venv" / "half").exists()


def test_a_clone_that_was_moved_gets_a_new_environment(clone):
    clone.setup()
    clone.root = clone.root.rename(clone.root.with_name("moved"))
    assert clone.setup().returncode == 0
    assert clone.done()[0] == "python -m venv .venv"


def test_an_environment_without_our_mark_is_kept_and_filled(clone):
    (clone.root / ".venv/bin").mkdir(parents=True)
    shutil.copy(clone.python, clone.root / ".venv/bin/python")
    assert clone.setup().returncode == 0
    assert len(clone.done()) == 3


def test_a_python310_is_found_by_running_the_candidates(clone):
    clone.write(clone.bin / "python3.10", NO_PYTHON)
    clone.write(clone.bin / "python3", FAKE_PYTHON)
    assert clone.setup(PYTHON="").returncode == 0
    assert clone.done()[0] == "python -m venv .venv"


def test_no_python310_is_one_line_that_says_what_to_do(clone):
    clone.write(clone.bin / "python3.10", NO_PYTHON)
    line = refusal(clone.setup(PYTHON=""))
    assert "no Python 3.10 found" in line and "make PYTHON=/path/to/python3.10 setup" in line
    assert not (clone.root / ".venv").exists()


def test_a_python_named_by_hand_must_be_310(clone):
    clone.write(clone.python, NO_PYTHON)
    clone.write(clone.bin / "python3.10", FAKE_PYTHON)
    assert f"PYTHON={clone.python} does not run as Python 3.10" in refusal(clone.setup())


def test_a_python_without_venv_is_named(clone):
    clone.write(clone.python, '#!/bin/bash\n[[ "$*" != *ensurepip* ]] && echo "$0"\n')
    assert f"{clone.python} cannot make virtual environments" in refusal(clone.setup())


@pytest.mark.parametrize("system, machine", [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_other_platforms_are_refused_before_anything_is_installed(clone, system, machine):
    answers = f"#!/bin/bash\n[[ $1 == -s ]] && echo {system} || echo {machine}\n"
    clone.write(clone.bin / "uname", answers)
    assert f"this is {system} on {machine}" in refusal(clone.setup())
    assert clone.done() == []


def test_an_environment_of_ones_own_is_checked_by_importing(clone, tmp_path):
    env = tmp_path / "mine"
    assert f"there is no {env}/bin/python" in refusal(clone.setup("--check", str(env)))
    (env / "bin").mkdir(parents=True)
    clone.write(env / "bin/python", "#!/bin/bash\necho noise\n")
    assert clone.setup("--check", str(env)).returncode == 0
    clone.write(
        env / "bin/python", "#!/bin/bash\necho noise; echo 'cannot import cv2 (no libGL)'; exit 1\n"
    )
    line = refusal(clone.setup("--check", str(env)))
    assert f"VENV={env} cannot import cv2 (no libGL)" in line
    assert not (clone.root / ".venv").exists()


def dry_run(*arguments: str) -> str:
    env = {"PATH": os.environ["PATH"]}
    command = ["make", "--no-print-directory", "-n", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_make_sets_up_before_demo_and_tests():
    tests = 'OMP_NUM_THREADS=1 ".venv/bin/python" -m pytest '
    assert dry_run("test").startswith("tools/setup_env.sh\n" + tests)
    assert dry_run("demo") == 'tools/setup_env.sh\n".venv/bin/python" tools/demo.py\n'
    for target, options in (("benchmark", ""), ("benchmark-quick", " --quick")):
        python = f'".venv/bin/python" tools/recorded_benchmark.py{options}\n'
        assert dry_run(target) == f"tools/setup_env.sh\n{python}"


def test_make_with_ones_own_environment_only_checks_it():
    commands = dry_run("VENV=/some/env", "test")
    tests = 'OMP_NUM_THREADS=1 "/some/env/bin/python" -m pytest '
    assert commands.startswith('tools/setup_env.sh --check "/some/env"\n' + tests)


def locked() -> dict[str, str]:
    """Name and version of every package in requirements.lock."""
    pairs = re.findall(r"^([a-z0-9-]+)==(\S+) \\$", LOCK, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_line_of_the_lock_is_a_version_or_a_hash_or_a_comment():
    line = re.compile(r"[a-z0-9-]+==\S+ \\| {4}--hash=sha256:[0-9a-f]{64}( \\)?| *#.*|")
    assert [text for text in LOCK.splitlines() if not line.fullmatch(text)] == []
    assert "/" not in LOCK  # neither an address nor a path
    entries = re.findall(r"^\S+==\S+ \\\n {4}--hash", LOCK, re.MULTILINE)
    assert len(entries) == len(locked())


def test_the_lock_has_what_was_asked_for():
    lines = (ROOT / "requirements.in").read_text().splitlines()
    for asked in (Requirement(line) for line in lines if line and not line.startswith("#")):
        assert asked.specifier.contains(locked()[canonicalize_name(asked.name)])


def test_the_lock_is_complete():
    """Whatever a locked package requires is locked or left out on purpose (of those that are
    installed here)."""
    overrides = (ROOT / "overrides.txt").read_text()
    left_out = set(re.findall(r'^(\S+); python_version < "3"$', overrides, re.MULTILINE))
    assert left_out
    for name, version in locked().items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = map(Requirement, distribution.requires or [])
        active = [need for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
        if distribution.version == version:
            missing = {canonicalize_name(need.name) for need in active} - locked().keys()
            assert missing <= left_out, name


def test_the_package_declares_what_it_is(monkeypatch):
    declared = {}
    monkeypatch.setattr(setuptools, "setup", declared.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    assert declared["name"] == "moco_d2"
    assert declared["version"] == moco_d2.__version__
    assert declared["python_requires"] == ">=3.10"
    names = {Requirement(line).name for line in declared["install_requires"]}
    assert names == {"torch", "torchvision", "fvcore", "iopath", "opencv-python"}
    folders = {path.parent for path in (ROOT / "moco_d2").rglob("__init__.py")}
    assert set(declared["packages"]) == {
        ".".join(folder.relative_to(ROOT).parts) for folder in folders
    }
