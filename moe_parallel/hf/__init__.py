"""Registers the models that tools/export_hf.py writes, so that transformers loads them.

    import moe_parallel.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("exported")

Without this import, `from_pretrained` takes the copy of the same classes in the exported folder,
with `trust_remote_code=True`.
"""

from moe_parallel.optional import import_optional

import_optional("transformers", "moe_parallel.hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from moe_parallel.hf.configuration_moe_parallel import MoeParallelConfig  # noqa: E402
from moe_parallel.hf.modeling_moe_parallel import (  # noqa: E402
    MoeParallelForCausalLM,
    MoeParallelModel,
)

__all__ = ["MoeParallelConfig", "MoeParallelForCausalLM", "MoeParallelModel"]

AutoConfig.register(MoeParallelConfig.model_type, MoeParallelConfig)
AutoModel.register(MoeParallelConfig, MoeParallelModel)
AutoModelForCausalLM.register(MoeParallelConfig, MoeParallelForCausalLM)
