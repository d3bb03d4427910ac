# SPDX-License-Identifier: Apache-2.0
"""Optional packages are asked about by name, without importing them."""

import re
import subprocess
import sys

import pytest

from nemo2.base.backend import extras


@pytest.fixture(autouse=True)
def forget():
    for answers in (extras.has, extras.requirements):
        answers.cache_clear()
    yield
    for answers in (extras.has, extras.requirements):
        answers.cache_clear()


def test_what_is_there_is_found_and_what_is_not_is_not():
    assert extras.has("json")
    assert not extras.has("surely_no_such_package")


def test_a_package_hidden_by_a_test_counts_as_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert not extras.has("psutil")


def test_asking_imports_neither_the_package_nor_torch():
    code = "import sys; from nemo2.base.backend.extras import has; has('psutil'); print({'torch', 'psutil'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(("package", "gpu", "answer"), [(True, True, True), (True, False, False), (False, True, False)])
def test_transformer_engine_needs_its_package_and_a_gpu(monkeypatch, package, gpu, answer):
    import torch

    monkeypatch.setattr(extras, "has", lambda module: package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert extras.have_te() is answer


def test_reasons_say_what_to_do(monkeypatch):
    monkeypatch.setattr(extras, "has", lambda module: False)
    assert "pip install 'transformer-engine[pytorch]" in extras.why_missing("transformer_engine")
    assert "pip install surely_no_such_package" in extras.why_missing("surely_no_such_package")
    monkeypatch.setattr(extras, "has", lambda module: True)
    monkeypatch.setattr(extras, "have_te", lambda: False)
    assert "no GPU" in extras.why_missing("transformer_engine")


@pytest.mark.parametrize("checkout", [True, False])
def test_an_extra_is_installed_by_its_packages_wherever_nemo2_comes_from(monkeypatch, tmp_path, checkout):
    lines = ["torch>=2", "old; python_version < '3'", "a[x]>=1; extra == 'one'", "b; extra == 'two'"]
    lines.append("nemo2[one]; extra == 'two'")
    monkeypatch.setattr(extras, "requires", lambda name: lines)
    if not checkout:
        monkeypatch.setattr(extras, "__file__", str(tmp_path / "site" / "nemo2" / "base" / "backend" / "extras.py"))
    if checkout:
        assert {re.split("[<>=]", one)[0] for one in extras.requirements()} >= {"torch", "megatron-core", "nemo-run"}
        assert "transformers" in extras.install("serve") and "safetensors" in extras.install("serve")
        assert "nemo2" not in extras.install("serve")
    else:
        assert extras.requirements() == ("torch>=2",)
        assert extras.install("two") == "pip install 'b' 'a[x]>=1'"
