"""The names that are known without JAX are those of the implementations."""

import pytest

from jaxrl_async import config
from jaxrl_async.models import attention
from jaxrl_async.models import attention_names
from jaxrl_async.models import packed_attention
from jaxrl_async.rollout import paged_attention


def test_the_names_are_those_of_the_implementations():
  assert attention_names.PACKED == tuple(packed_attention.IMPLEMENTATIONS)
  assert attention_names.PREFILL == tuple(attention.CAUSAL)
  assert attention_names.DECODE == tuple(paged_attention.IMPLEMENTATIONS)


def test_a_kernel_that_reads_pages_wants_a_cache_of_pages():
  for name in (attention_names.AUTO, "xla", "cudnn"):
    attention_names.check_rollout(name, has_pages=False)
  attention_names.check_rollout("gpu_paged", has_pages=True)
  with pytest.raises(config.ConfigError, match="^rollout.attention: .*pages"):
    attention_names.check_rollout("gpu_paged", has_pages=False)
