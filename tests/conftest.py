import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports diffusers

import torch
from hypothesis import settings

# the same examples on every machine, and no flaky deadline on a busy one
settings.register_profile("ci", derandomize=True, max_examples=60, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
torch.set_num_threads(1)
