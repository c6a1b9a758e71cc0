"""What clients may read of an error's text."""

import pytest

from verl_tinker.core.errors import EngineError, UserError


@pytest.mark.parametrize("text, told", [
    ("No such file or directory: '/srv/my models/a/config.json'", "No such file or directory: 'config.json'"),
    ('cannot open "/x/y"', 'cannot open "y"'),
    ("cannot open /srv/run_train_0/weights/a/x.safetensors (os error 2)", "cannot open x.safetensors (os error 2)"),
    ("~/models/base is no folder, /dev/shm is full", "base is no folder, shm is full"),
    ("in File(/usr/lib/torch/nn.py)", "in File(nn.py)"),
    ("tinker://a:train:0/weights/b, org/model and http://h:1/a/b stay", "tinker://a:train:0/weights/b, org/model and http://h:1/a/b stay"),
    ("GET /api/v1/training_runs/a/checkpoints lists them", "GET /api/v1/training_runs/a/checkpoints lists them"),
    ("1/2 and / or a/b/c", "1/2 and / or a/b/c"),
])
def test_paths_of_the_machine_are_cut_to_their_last_part(text, told):
    assert EngineError(text).told == told


def test_what_a_user_wrote_is_given_back_as_it_was():
    assert UserError("path '/a/b/c' is not a checkpoint path").told == "path '/a/b/c' is not a checkpoint path"
