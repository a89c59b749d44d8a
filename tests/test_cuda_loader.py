"""csrc/cuda/loader.cpp with a driver that only prints its calls: their order, and errors.

This needs no GPU and no CUDA.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cases import compiler

ROOT = Path(__file__).parent.parent
MAIN = """
#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include "launch.h"
int main(int count, char **device) {
    dlopen("libtorch_cuda.so", RTLD_NOW);  // as torch has
    const int params[] = {42};
    for (int i = 1; i < count; i++) try {
        std::puts("--");
        wavepe::cuda::launch("rope_f32", {1000, 10, 70000}, params, std::atoi(device[i]));
    } catch (const std::exception &error) {
        std::printf("error: %s\\n", error.what());
    }
}
"""
LAUNCH = "launch 8: 8 10 65535 blocks of 128 1 1, 0 shared, stream {}, first parameter 42"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return a function that launches on given devices, and returns the printed calls."""
    if not (ROOT / "csrc/cuda/loader.cpp").is_file():
        pytest.skip("not run from a source tree")
    cc, cxx = compiler("CC"), compiler("CXX")
    if not (shutil.which(cc[0]) and shutil.which(cxx[0])):
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("loader")
    (folder / "main.cpp").write_text(MAIN)
    (folder / "kernels").write_bytes(bytes([0x11, 0x22, 0x33, 0x44]))
    for name in ("libcuda.so.1", "libtorch_cuda.so"):
        run(*cc, "-shared", "-fPIC", str(ROOT / "tests/fake_driver.c"), "-o", str(folder / name))

    def build(name, *flags):
        sources = [str(folder / "main.cpp"), str(ROOT / "csrc/cuda/loader.cpp")]
        include = f"-I{ROOT / 'csrc/cuda'}"
        run(*cxx, "-std=c++20", "-Wall", "-Werror", include, *flags, *sources, "-o",
            str(folder / name), "-ldl", "-pthread")  # fmt: skip

    fatbin = f'-DWPE_FATBIN="{folder / "kernels"}"'
    build("whole", fatbin, "-include", "cstdlib", '-DWPE_DRIVER=std::getenv("DRIVER")')
    build("empty")

    def launch(*devices, program="whole", **environment):
        known = {"LD_LIBRARY_PATH": str(folder), "DRIVER": "libcuda.so.1"}
        environment = {**os.environ, **known, **environment}
        words = [str(folder / program), *map(str, devices)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return launch


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LOAD = ("capture mode 2", "load 44332211", "function rope_f32 of 5", "capture mode 0")


def test_what_a_launch_calls(program):
    assert program(3, 3, 1, 3) == [
        *("--", "retain 103", "push 1103", *LOAD, LAUNCH.format(73), "pop"),
        *("--", "push 1103", LAUNCH.format(73), "pop"),  # loaded already
        *("--", "retain 101", "push 1101", *LOAD, LAUNCH.format(71), "pop"),  # a module of its own
        *("--", "push 1103", LAUNCH.format(73), "pop"),
    ]


def test_the_context_that_torch_has_made_current(program):
    assert program(3, 1, FAKE_CONTEXT="1103") == [
        *("--", "retain 103", *LOAD, LAUNCH.format(73)),
        *("--", "retain 101", "push 1101", *LOAD, LAUNCH.format(71), "pop"),
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("cuDeviceGet", "cuDeviceGet: made to fail (CUDA error 999)"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain: made to fail"),
        ("cuCtxGetCurrent", "cuCtxGetCurrent: made to fail"),
        ("cuCtxPushCurrent_v2", "cuCtxPushCurrent: made to fail"),
        ("cuThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode: made to fail"),
        ("cuModuleLoadData", "the CUDA kernels could not be loaded: made to fail"),
        ("cuModuleGetFunction", "kernel rope_f32: made to fail"),
        ("cuLaunchKernel", "launching kernel rope_f32: made to fail"),
        ("aoti_torch_get_current_cuda_stream", "torch has no current stream"),
    ],
)
def test_what_fails_is_said_and_tried_again(program, function, message):
    printed = program(0, 0, FAKE_FAIL=function)
    assert sum(line.startswith(f"error: wavepe: {message}") for line in printed) == 2, printed
    if function != "cuCtxPushCurrent_v2":
        assert printed.count("pop") == sum(line.startswith("push") for line in printed)


def test_without_a_driver(program):
    (*_, message) = program(0, DRIVER="libnowhere.so.1")
    assert message.startswith("error: wavepe: no CUDA driver: libnowhere.so.1: cannot open")


def test_a_build_without_kernels(program):
    (*_, message) = program(0, program="empty")
    assert message.startswith(
        "error: wavepe: this build holds no CUDA kernels, as there was no nvcc"
    )
