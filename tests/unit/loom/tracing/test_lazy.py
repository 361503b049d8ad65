import subprocess
import sys


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_loom_has_timing_without_an_import_of_its_own():
    assert run("import loom; print(loom.tracing.span.__name__)") == ["span"]


def test_timing_needs_neither_torch_nor_monarch_nor_an_http_client():
    code = "import sys, loom.tracing; print(*sys.modules)"
    assert not {"torch", "monarch", "urllib.request", "http.client", "asyncio", "msgpack"} & set(run(code))
