"""Building without a compiler: keys, manifests, and every way in which a build can fail."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvshare import build, fetch, patches
from kvshare.errors import BuildError

PIN = patches.Pin("toy", "1.0", "", "vendor/llama.cpp", "c" * 40, "")
LLAMA = {"include/llama.h": b"// llama\n", "ggml/CMakeLists.txt": b"# ggml\n", "run.sh": b"#!/bin/sh\n"}
PATCH = b"""Subject: toy : add a file
diff --git a/src/share.h b/src/share.h
new file mode 100644
--- /dev/null
+++ b/src/share.h
@@ -0,0 +1 @@
+#define LLAMA_KV_SHARE_SERIES "0000000000000000000000000000000000000000000000000000000000000000"
"""


def write_sdist(path: Path, *, extra: Sequence[tuple[str, bytes]] = ()) -> str:
    with tarfile.open(path, "w:gz") as tar:
        files = [(f"toy-1.0/vendor/llama.cpp/{name}", content) for name, content in LLAMA.items()]
        files += [("toy-1.0/vendor/llama.cpp/.git", b"gitdir: nowhere\n"), ("toy-1.0/setup.py", b""), *extra]
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(content))
    return fetch.sha256_of(path)


class Toy:
    """A cache, a tiny pin and series, and stand-ins for pip, CMake and the compiler."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = tmp_path / "cache"
        self.sdist = tmp_path / "toy-1.0.tar.gz"
        self.bin = tmp_path / "bin"
        self.bin.mkdir()
        self.downloads = 0
        pin = patches.Pin(**vars(PIN) | {"sdist_sha256": write_sdist(self.sdist)})
        series = patches.Series((patches.parse_patch("toy.patch", PATCH),))
        monkeypatch.setenv("KVSHARE_CACHE", str(self.cache))
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(patches, "pin", lambda *_: pin)
        monkeypatch.setattr(patches, "load_series", lambda *_: series)
        monkeypatch.setattr(build, "download", self._download)
        self.tool("c++", "echo toy compiler 1")
        self.tool("ninja", "exit 0")
        self.cmake()

    def tool(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def cmake(self, compile_: str = "", configure: str = "") -> None:
        """A CMake that writes its calls to `calls`, and makes the library and each target."""
        self.tool(
            "cmake",
            f"""echo "$@" >> {self.bin}/calls
            if [ "$1" = --build ]; then
                {compile_}
                echo '[1/2] one'; echo '[2/2] two'
                mkdir -p $2/bin; echo lib > $2/bin/libllama.so
                for target; do touch $2/bin/$target; done
            else
                mkdir -p $4; {configure or ":"}
                echo "CMAKE_CACHEFILE_DIR:INTERNAL=$4" > $4/CMakeCache.txt
                echo "CMAKE_HOME_DIRECTORY:INTERNAL=$2" >> $4/CMakeCache.txt
                echo "CMAKE_MAKE_PROGRAM:FILEPATH={self.bin}/ninja" >> $4/CMakeCache.txt
            fi""",
        )

    def calls(self) -> list[str]:
        file = self.bin / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def _download(self, requirements: Sequence[str], directory: Path, **_: object) -> None:
        self.downloads += 1
        shutil.copy(self.sdist, directory / "toy-1.0.tar.gz")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    return Toy(tmp_path, monkeypatch)


# -- the good path -----------------------------------------------------------------------------


def test_builds_once(toy: Toy) -> None:
    assert build.find_build() is None
    steps: list[tuple[str, int, int | None]] = []
    info = build.build(progress=lambda *step: steps.append(step))
    assert (info.lib_dir / "libllama.so").read_text() == "lib\n"
    assert info.series_id == patches.series_id()
    assert info.commit == PIN.commit
    assert ("compiling", 2, 2) in steps
    assert build.find_build() == info
    assert build.build() == info
    assert toy.downloads == 1
    assert len(toy.calls()) == 2
    assert json.loads((info.path / build.MANIFEST).read_text())["series_id"] == info.series_id
    assert not list(toy.cache.rglob(".fetch-*")) + list(toy.cache.rglob(".unpack-*"))


def test_source_is_the_patched_tree_without_git_file(toy: Toy) -> None:
    build.build()
    (tree,) = [path for path in (toy.cache / "src").iterdir() if path.is_dir()]
    assert patches.check(tree).state == "applied"
    assert not (tree / ".git").exists()
    assert not (tree / "setup.py").exists()
    assert os.access(tree / "run.sh", os.X_OK)


def test_target_is_added_to_the_same_build(toy: Toy) -> None:
    info = build.build()
    program = build.build_target("test-llama-archs")
    assert program == info.lib_dir / "test-llama-archs"
    assert "--target llama test-llama-archs" in toy.calls()[-1]
    n_calls = len(toy.calls())
    assert build.build_target("test-llama-archs") == program
    assert build.build().path == info.path
    assert len(toy.calls()) == n_calls


def test_options_win_over_defaults_and_name_the_build(toy: Toy) -> None:
    toy.tool("nvcc", "exit 0")
    plain = build.build()
    same = build.build(cmake_args=["-DGGML_CUDA:BOOL=ON", "LLAMA_OPENSSL=ON", "-Wno-dev"])
    assert same.path != plain.path
    assert {"-DGGML_CUDA=ON", "-DLLAMA_OPENSSL=ON", "-Wno-dev"} <= set(same.cmake_args)
    assert "-DLLAMA_OPENSSL=OFF" not in same.cmake_args
    again = build.build(cmake_args=["-DLLAMA_OPENSSL=ON", "-DGGML_CUDA=ON", "-Wno-dev"])
    assert again == same
    assert build.find_build() == same
    assert build.build() == plain
    os.utime(plain.path / build.MANIFEST, (2e9, 2e9))
    assert build.find_build() == plain


def test_key_follows_compiler_cpu_and_series(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {build.build().path}
    toy.tool("c++", "echo toy compiler 2")
    paths.add(build.build().path)
    monkeypatch.setattr(build, "_machine", lambda: "another cpu")
    paths.add(build.build().path)
    series = patches.Series((patches.parse_patch("toy.patch", PATCH.replace(b"add a file", b"add it")),))
    monkeypatch.setattr(patches, "load_series", lambda *_: series)
    assert build.find_build() is None
    paths.add(build.build().path)
    assert len(paths) == 4


@pytest.mark.parametrize("content", ["", "{}", "[]", "not json", '{"path": 1}'])
def test_damaged_manifest_counts_as_no_build(toy: Toy, content: str) -> None:
    info = build.build()
    (info.path / build.MANIFEST).write_text(content)
    assert build.find_build() is None
    assert build.build() == info
    (info.lib_dir / "libllama.so").unlink()
    assert build.find_build() is None


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing program", "missing library"])
def test_a_damaged_build_is_made_again(toy: Toy, damage: str) -> None:
    """What `kvshare build` is the hint for, it mends."""
    program = build.build_target("test-llama-archs")
    info = build.find_build()
    assert info is not None
    library = info.lib_dir / "libllama.so"
    if damage == "truncated":
        library.write_text("li")
    elif damage == "changed":
        library.write_text("bad\n")
    else:
        (program if damage == "missing program" else library).unlink()
    assert (build.find_build() is None) == (damage != "changed")
    assert build.build().targets == ("llama",)
    assert library.read_text() == "lib\n"
    assert build.build_target("test-llama-archs").is_file()


def test_a_build_that_cannot_be_written_to(toy: Toy) -> None:
    """Such as that of another user: it is taken as it is, and what would need more says so."""
    info = build.build()
    lock = info.path.with_name(f"{info.path.name}.lock")
    lock.unlink()
    lock.mkdir()
    assert build.build() == info
    with pytest.raises(BuildError, match="cannot write to") as caught:
        build.build_target("test-llama-archs")
    assert "KVSHARE_CACHE" in (caught.value.hint or "")


def test_a_cache_that_cannot_be_read(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "glob", forbidden)
    assert build.find_build() is None


@pytest.mark.parametrize("name", ["CC", "CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS"])
def test_key_follows_flags_of_the_environment(toy: Toy, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name, raising=False)
    plain = build.build()
    monkeypatch.setenv(name, "")
    assert build.build() == plain
    monkeypatch.setenv(name, "-g")
    assert build.build().path != plain.path


@pytest.mark.parametrize("changed", ["cache", "source", "ninja"])
def test_what_cmake_remembers_of_another_place_is_dropped(toy: Toy, changed: str) -> None:
    info = build.build()
    kept = info.path / "tree" / "kept"
    kept.touch()
    build.build_target("test-llama-archs")
    assert kept.exists()
    file = info.path / "tree" / "CMakeCache.txt"
    text = file.read_text()
    places = {"cache": str(info.path), "source": str(toy.cache / "src"), "ninja": str(toy.bin)}
    file.write_text(text.replace(places[changed], "/moved"))
    build.build_target("llama-server")
    assert not kept.exists()
    assert file.read_text() == text


# -- a checkout of the user --------------------------------------------------------------------


def write_checkout(path: Path) -> Path:
    for name, content in LLAMA.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def test_checkout_is_compiled_every_time_and_never_patched(toy: Toy, tmp_path: Path) -> None:
    tree = write_checkout(tmp_path / "mine")
    with pytest.raises(BuildError, match="does not have the patch series") as caught:
        build.build(source=tree)
    assert caught.value.hint == f"run `kvshare patch apply {tree}` first"
    assert patches.check(tree).state == "clean"
    patches.apply(tree)
    info = build.build(source=tree)
    assert info.source == str(tree)
    assert build.build(source=tree).path == info.path
    assert len(toy.calls()) == 4
    assert toy.downloads == 0
    assert build.find_build() == info
    toy.cmake(compile_="exit 1")
    with pytest.raises(BuildError, match="compiling failed"):
        build.build(source=tree)
    assert build.find_build() is None


def test_checkout_that_is_none(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"not the root of a llama\.cpp tree"):
        build.build(source=tmp_path)


# -- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "said"),
    [
        (["ninja", "c++"], "no cmake"),
        (["cmake", "c++"], "neither ninja nor make"),
        (["cmake", "ninja"], r"no C\+\+ compiler"),
    ],
)
def test_missing_tool(toy: Toy, monkeypatch: pytest.MonkeyPatch, present: list[str], said: str) -> None:
    which = {name: str(toy.bin / name) for name in present}
    monkeypatch.setattr(build, "shutil", SimpleNamespace(which=which.get))
    with pytest.raises(BuildError, match=said) as caught:
        build.build()
    assert "apt-get install -y cmake g++ ninja-build" in str(caught.value.hint)
    assert not toy.cache.exists()


def test_named_compiler_is_missing(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(BuildError, match="no-such-compiler"):
        build.build()
    with pytest.raises(BuildError, match="other-compiler"):
        build.build(cmake_args=["-DCMAKE_CXX_COMPILER=other-compiler"])


NVCC = "echo 'nvcc: NVIDIA (R) Cuda compiler driver'; echo 'Cuda compilation tools, release 13.0, V13.0.88'"
CUDA = ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90"]


@pytest.fixture
def no_nvcc(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the toolkit is installed."""
    monkeypatch.setenv("PATH", f"{toy.bin}:{few_tools(toy)}")
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(build, "_USUAL_NVCC", ())


def few_tools(toy: Toy) -> Path:
    """What the stand-ins need, and nothing else of the machine."""
    folder = toy.bin.parent / "few"
    folder.mkdir()
    for name in ("sh", "mkdir", "touch", "rm"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


@pytest.mark.usefixtures("no_nvcc")
def test_nvcc_is_missing(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is fetched or compiled, with what to do."""
    with pytest.raises(BuildError, match=r"no CUDA compiler \(nvcc\)") as error:
        build.build(cmake_args=CUDA)
    assert "install the CUDA toolkit" in (error.value.hint or "")
    usual = tmp_path / "nvcc"
    usual.touch()
    monkeypatch.setattr(build, "_USUAL_NVCC", (str(usual),))
    with pytest.raises(BuildError) as error:
        build.build(cmake_args=["GGML_CUDA:BOOL=1"])
    assert error.value.hint == f"name it: --cmake-arg=-DCMAKE_CUDA_COMPILER={usual}"
    assert toy.calls() == []
    assert toy.downloads == 0
    build.build(cmake_args=["-DGGML_CUDA=OFF"])


@pytest.mark.usefixtures("no_nvcc")
def test_nvcc_that_is_named(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.tool("my-nvcc", NVCC)
    nvcc = str(toy.bin / "my-nvcc")
    info = build.build(cmake_args=[*CUDA, f"-DCMAKE_CUDA_COMPILER={nvcc}"])
    assert info.compiler == "toy compiler 1; Cuda compilation tools, release 13.0, V13.0.88"
    monkeypatch.setenv("CUDACXX", nvcc)
    assert build.build(cmake_args=CUDA).path != info.path
    with pytest.raises(BuildError, match="no CUDA compiler"):
        build.build(cmake_args=[*CUDA, f"-DCMAKE_CUDA_COMPILER={tmp_path}/none"])


@pytest.mark.usefixtures("no_nvcc")
def test_key_of_a_cuda_build(toy: Toy) -> None:
    """It follows nvcc, and the GPUs of the machine where CMake is to compile for these."""
    host = build.build().path
    toy.tool("nvcc", NVCC)
    named, native = build.build(cmake_args=CUDA), build.build(cmake_args=CUDA[:1])
    assert len({host, named.path, native.path}) == 3
    assert named.compiler.endswith("V13.0.88")
    assert native.compiler.endswith("V13.0.88, for no GPU")
    toy.tool("nvidia-smi", "[ $1 = --query-gpu=compute_cap ] && echo 9.0 && echo 8.6 && echo 9.0")
    here = build.build(cmake_args=CUDA[:1])
    assert here.compiler.endswith(", for 8.6 9.0")
    assert here.path != native.path
    assert build.build(cmake_args=CUDA).path == named.path
    toy.tool("nvcc", NVCC.replace("88", "99"))
    assert build.build(cmake_args=CUDA).path != named.path
    assert build.build().path == host


@pytest.mark.usefixtures("no_nvcc")
def test_a_compiler_that_would_take_the_static_standard_library(toy: Toy) -> None:
    """With CUDA, other libraries of the process bring the shared one."""
    toy.tool("nvcc", NVCC)
    wanted = "-DCMAKE_CXX_STANDARD_LIBRARIES=-l:libstdc++.so.6"
    assert wanted not in build.build(cmake_args=CUDA).cmake_args  # the stand-in links nothing
    named = 'for name in "$@"; do [ "$before" = -o ] && out=$name; before=$name; done'
    toy.tool("c++", f"{named}; echo toy compiler 2; echo NEEDED libstdc++.so.6 > ${{out:-/dev/null}}")
    assert wanted not in build.build(cmake_args=CUDA).cmake_args
    toy.tool("c++", f"{named}; echo toy compiler 3; echo NEEDED ${{before#-l:}} > ${{out:-/dev/null}}")
    static = build.build(cmake_args=CUDA).cmake_args
    assert wanted in static
    assert wanted.replace("CXX", "CUDA") in static
    assert wanted not in build.build().cmake_args
    own = wanted.replace("=-l", "=-static -l")
    assert own in build.build(cmake_args=[*CUDA, own]).cmake_args


def test_no_space(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=1 << 30)))
    with pytest.raises(BuildError, match=r"no disk space: .* has 1\.0 GiB free, 3\.0 GiB are needed"):
        build.build()
    assert toy.downloads == 0


def test_space_runs_out_while_unpacking(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(build, "unpack_tree", full)
        with pytest.raises(BuildError, match="no disk space left"):
            build.build()
    assert build.build()


def test_wrong_hash_is_not_kept(toy: Toy) -> None:
    right = toy.sdist.read_bytes()
    toy.sdist.write_bytes(right + b"more")
    with pytest.raises(BuildError, match="has sha256"):
        build.fetch_sdist()
    assert [path.name for path in (toy.cache / "sdist").iterdir()] == [".lock"]
    toy.sdist.write_bytes(right)
    archive = build.fetch_sdist()
    archive.write_bytes(b"damaged later")
    assert build.fetch_sdist().read_bytes() == right
    assert toy.downloads == 3


@pytest.mark.parametrize("stage", ["configure", "compile_"])
def test_failing_step_shows_the_end_of_the_log(toy: Toy, stage: str) -> None:
    failing = (
        "i=0; while [ $i -lt 99 ]; do i=$((i+1)); echo line $i; done; echo 'x.cpp:1: error: bad'; exit 3"
    )
    toy.cmake(**{stage: failing})
    with pytest.raises(BuildError, match=r"failed \(status 3\)") as caught:
        build.build()
    lines = str(caught.value).splitlines()
    assert len(lines) == 31
    assert lines[-1] == "x.cpp:1: error: bad"
    assert "build.log" in str(caught.value.hint)
    assert build.find_build() is None
    toy.cmake()
    assert build.build().targets == ("llama",)


def test_compiler_meets_a_full_disk(toy: Toy) -> None:
    toy.cmake(compile_="echo 'fatal error: x.o: No space left on device'; exit 1")
    with pytest.raises(BuildError, match="compiling failed: no space left on device"):
        build.build()


def test_killed_compiler(toy: Toy) -> None:
    toy.cmake(compile_="echo 'c++: fatal error: Killed signal terminated program cc1plus'; exit 1")
    with pytest.raises(BuildError) as caught:
        build.build()
    assert "--jobs 1" in str(caught.value.hint)


def test_interrupt_leaves_a_build_that_goes_on(toy: Toy) -> None:
    def interrupt(step: str, done: int, total: int | None) -> None:
        if step == "compiling":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.build(progress=interrupt)
    assert build.find_build() is None
    assert build.build()
    assert toy.downloads == 1


def test_interrupt_ends_the_compilers_too(toy: Toy) -> None:
    toy.cmake(compile_=f"sleep 600 & echo $! > {toy.bin}/pid; echo '[1/2] one'; wait")

    def interrupt(step: str, done: int, total: int | None) -> None:
        if done == 1 and total == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.build(progress=interrupt)
    pid = int((toy.bin / "pid").read_text())
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_changed_cached_source_is_refused(toy: Toy) -> None:
    build.build()
    (tree,) = [path for path in (toy.cache / "src").iterdir() if path.is_dir()]
    (tree / "src/share.h").write_text("// edited\n")
    with pytest.raises(BuildError, match="was changed") as caught:
        build.build(targets=["other"])
    assert caught.value.hint == f"run `rm -r {tree}`"


def test_cache_that_cannot_be_made(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVSHARE_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot create") as caught:
        build.build()
    assert "KVSHARE_CACHE" in str(caught.value.hint)


@pytest.mark.parametrize(
    "name", ["toy-1.0/vendor/llama.cpp/../../../../evil", "toy-1.0/vendor/llama.cpp/a/../../b"]
)
def test_archive_that_leaves_its_folder(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "a.tar.gz"
    write_sdist(archive, extra=[(name, b"x")])
    with pytest.raises(BuildError, match="will not unpack"):
        build.unpack_tree(archive, tmp_path / "out" / "in")
    assert not (tmp_path / "evil").exists()


def test_damaged_archive(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    write_sdist(archive)
    for n, content in enumerate([b"", b"not gzip", archive.read_bytes()[:-200]]):
        archive.write_bytes(content)
        with pytest.raises(BuildError, match="is damaged"):
            build.unpack_tree(archive, tmp_path / str(n))


# -- pip ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("x: No module named pip", "this Python has no pip"),
        ("WARNING: Retrying: Temporary failure in name resolution\nERROR: No matching", "no network"),
        ("ERROR: Could not find a version\nERROR: No matching distribution found for a==1", "No matching"),
        ("ERROR: [Errno 28] No space left on device", "no disk space"),
        ("", "pip says"),
    ],
)
def test_pip_failure_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, said: str
) -> None:
    pip = tmp_path / "python"
    pip.write_text(f"#!/bin/sh\ncat <<'E' >&2\n{output}\nE\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(BuildError, match=said) as caught:
        fetch.download(["a==1"], tmp_path, sdist=True, step="downloading a")
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHARE_CACHE", "/somewhere")
    assert fetch.cache_dir() == Path("/somewhere")
    monkeypatch.delenv("KVSHARE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert fetch.cache_dir() == Path("/xdg/kvshare")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert fetch.cache_dir() == Path("/home/me/.cache/kvshare")


def test_lock_waits_for_another_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = """
import sys, pathlib, kvshare.fetch
with kvshare.fetch.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
    waits: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()

        def waiting(step: str, done: int, total: int | None) -> None:
            waits.append(step)
            assert process.stdin is not None
            process.stdin.close()

        with fetch.locked(path, waiting):
            pass
    assert waits[0] == "waiting for another kvshare"
