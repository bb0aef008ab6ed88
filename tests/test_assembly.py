"""What only a whole config can tell: sizes against devices, names."""

import pathlib
import sys

import pytest

from jaxrl_async import assembly
from jaxrl_async import config as config_lib

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from configs import tiny  # noqa: E402


@pytest.mark.parametrize(
  ("axis", "size", "what"),
  [
    ("train_tensor", 3, "vocabulary of 98"),
    ("rollout_tensor", 7, "number of heads of 4"),
    ("train_fsdp", 3, "model dimension of 32"),
  ],
)
def test_a_model_that_a_mesh_cannot_split_is_refused_in_one_line(
  axis, size, what
):
  config = tiny.get_config()
  setattr(config.mesh, axis, size)
  with pytest.raises(config_lib.ConfigError) as caught:
    assembly.check(config, 8)
  assert str(caught.value).startswith(
    f"mesh.{axis}: {size} does not divide the {what}"
  )
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "sizes",
  [{}, {"train_fsdp": 4, "train_data": 1}, {"train_data": 3}],
)
def test_a_mesh_that_splits_the_model_is_accepted(sizes):
  config = tiny.get_config()
  for axis, size in sizes.items():
    setattr(config.mesh, axis, size)
  assembly.check(config, 8)


def test_a_model_without_a_name_is_refused():
  config = tiny.get_config()
  config.model.name = "tinny"
  with pytest.raises(config_lib.ConfigError, match="^model.name: 'tinny'"):
    assembly.check(config, 2)
