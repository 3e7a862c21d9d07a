"""The C++ sources of the kernels for CPUs."""

import subprocess

import pytest

from rtx.attention.engine import compiler


def test_the_sources_compile_without_warnings() -> None:
    try:
        command = compiler.compiler_command()
    except RuntimeError as error:
        pytest.skip(str(error))
    flags = [flag for flag in compiler.FLAGS if flag not in ("-w", "-shared")]
    checks = ["-O1", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    source = str(compiler.SOURCES[0])
    words = [*command, *flags, *checks, source]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
