"""The distribution: the wheel's content, its metadata, and the tested versions of all requirements."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_layering import every_source, imports

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("secure_fed", "privacy", "protocols", "attacks")
EXTRAS = {"evaluate", "flower", "quantized", "tensorboard", "wandb", "mlflow", "trl", "bench", "docs", "dev"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements() -> dict[str, Requirement]:
    """Every direct requirement, of the package and its extras, by canonical name, itself left out."""
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    found = {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}
    return {name: requirement for name, requirement in found.items() if name != PROJECT["name"]}


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def imported_names() -> set[str]:
    """Top-level names that the four packages import from beyond themselves and the standard library."""
    found = (
        name.partition(".")[0]
        for module, (text, is_package) in every_source().items()
        for _, name in imports(module, text, is_package=is_package)
    )
    return set(found) - set(PACKAGES) - set(sys.stdlib_module_names)


def test_the_version_is_the_installed_one() -> None:
    import secure_fed

    assert secure_fed.__version__ == importlib.metadata.version("secure-fed") == PROJECT["version"]


def test_the_dependencies_are_what_the_packages_import() -> None:
    called = {"scikit-learn": "sklearn"}  # dp-accounting is dp_accounting
    named = [Requirement(line).name for line in PROJECT["dependencies"]]
    core = {called.get(name, name.replace("-", "_")) for name in named}
    optional = {"accelerate", "bitsandbytes", "tensorboard", "flwr", "lm_eval", "wandb", "mlflow"}
    assert imported_names() - optional == core


def test_the_tested_versions_are_exact_and_name_no_place() -> None:
    parsed = [Requirement(line) for line in constraint_lines()]
    assert all(
        [spec.operator for spec in requirement.specifier] == ["=="] and requirement.url is None
        for requirement in parsed
    )
    assert not [str(requirement) for requirement in parsed if "+" in str(requirement.specifier)]


def test_every_requirement_has_a_tested_version_within_its_range() -> None:
    tested = {
        canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
        for requirement in map(Requirement, constraint_lines())
    }
    outside = {
        name: tested.get(name)
        for name, requirement in requirements().items()
        if name not in tested or tested[name] not in requirement.specifier
    }
    assert outside == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this source tree, built with no network."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode("utf-8"))


@pytest.mark.slow
def test_the_wheel_carries_every_file_of_the_four_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"secure_fed/learning/models/tiny/config.json", "secure_fed/learning/models/tiny/model.safetensors"} <= files
    assert {f"{package}/py.typed" for package in PACKAGES} <= files
    information = f"secure_fed-{PROJECT['version']}.dist-info/"
    assert files == {name for name in wheel.namelist() if not name.startswith(information)}


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["Name"] == "secure-fed"
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    (licence,) = (name for name in wheel.namelist() if name.endswith("/licenses/LICENSE"))
    assert "Apache License" in wheel.read(licence).decode("utf-8")
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "secure-fed = secure_fed.__main__:main" in wheel.read(entry_points).decode("utf-8")
