import sys
from pathlib import Path

import pytest
import torch
from harness import Kit

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests of single functions import `common`


@pytest.fixture
def kit(tmp_path):
    kit = Kit(tmp_path)
    yield kit
    kit.kill_all()


def pytest_collection_modifyitems(items):
    if not torch.accelerator.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="torch finds no GPU here"))
