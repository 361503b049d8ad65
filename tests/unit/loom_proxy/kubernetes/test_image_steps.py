"""The failed steps of an image, in the log that Kubetorch's server writes."""

from __future__ import annotations

from loom_proxy.kubernetes.deployment import failures, steps_of

STEPS = steps_of(
    """FROM debian
RUN "${KT_PYTHON_PATH:-python3}" -c 'import sys'
RUN $KT_PIP_INSTALL_CMD --index-url https://here torch==2.9.1
RUN $KT_PIP_INSTALL_CMD --no-deps ./monarch-loom-source
COPY here there
"""
)

HEAD = "2026-11-26 20:34:18 - kubetorch.serving.http_server - "
TORCH = "uv pip install --python=python3 --index-url https://here torch==2.9.1"
LOOM = "uv pip install --python=python3 --no-deps ./monarch-loom-source"

FAILED = f"""Using Python binary: python3
{HEAD}INFO - Running: {TORCH}
{HEAD}ERROR - Failed to run command '{TORCH}' with stderr:
{HEAD}ERROR - error: torch is not there
{HEAD}ERROR - hint: look for it
{HEAD}INFO - Running: {LOOM}
{HEAD}ERROR - Failed to run command '{LOOM}' with stderr:
{HEAD}ERROR - error: Distribution not found
{HEAD}INFO - Kubetorch Server started.
{HEAD}ERROR - something else
"""


def test_the_steps_of_an_image_are_its_commands() -> None:
    assert STEPS == [
        "\"${KT_PYTHON_PATH:-python3}\" -c 'import sys'",
        "--index-url https://here torch==2.9.1",
        "--no-deps ./monarch-loom-source",
    ]


def test_each_failed_step_is_told_with_its_output() -> None:
    assert failures(FAILED, STEPS) == [
        f"the image's step `{TORCH}` failed: error: torch is not there; hint: look for it",
        f"the image's step `{LOOM}` failed: error: Distribution not found",
    ]


def test_a_step_that_was_done_again_has_not_failed() -> None:
    assert len(failures(f"{FAILED}{HEAD}INFO - Running: {TORCH}\n{HEAD}INFO - torch is there", STEPS)) == 1


def test_a_step_that_the_image_does_not_have_any_more_is_left_out() -> None:
    assert failures(FAILED, STEPS[:1]) == []


def test_only_so_much_of_the_output_is_told() -> None:
    log = f"{HEAD}ERROR - Failed to run command '{LOOM}' with stderr:\n" + f"{HEAD}ERROR - {'x' * 9000}\n" * 9
    (told,) = failures(log, STEPS)
    assert len(told) < 1000
