"""The model families, one file each; a line here lets its models be loaded."""

from graphdecode.models.families.bamba import Bamba
from graphdecode.models.families.gemma2 import Gemma2
from graphdecode.models.families.gemma3 import Gemma3
from graphdecode.models.families.gpt_oss import GptOss
from graphdecode.models.families.granite import Granite
from graphdecode.models.families.granite_hybrid import GraniteHybrid
from graphdecode.models.families.lfm2 import Lfm2
from graphdecode.models.families.llama import Llama
from graphdecode.models.families.mamba2 import Mamba2Family
from graphdecode.models.families.mistral import Mistral
from graphdecode.models.families.mixtral import Mixtral
from graphdecode.models.families.olmo2 import Olmo2
from graphdecode.models.families.olmo3 import Olmo3
from graphdecode.models.families.phi3 import Phi3
from graphdecode.models.families.qwen2 import Qwen2
from graphdecode.models.families.qwen2_moe import Qwen2Moe
from graphdecode.models.families.qwen3 import Qwen3
from graphdecode.models.families.qwen3_5 import Qwen3Next, Qwen35
from graphdecode.models.families.qwen3_moe import Qwen3Moe
from graphdecode.models.families.smollm3 import SmolLM3
from graphdecode.models.family import register_family

__all__ = [
    "Bamba",
    "Gemma2",
    "Gemma3",
    "GptOss",
    "Granite",
    "GraniteHybrid",
    "Lfm2",
    "Llama",
    "Mamba2Family",
    "Mistral",
    "Mixtral",
    "Olmo2",
    "Olmo3",
    "Phi3",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
    "Qwen3Next",
    "Qwen35",
    "SmolLM3",
]

register_family(Llama())
register_family(Mistral())
register_family(Mixtral())
register_family(Qwen2())
register_family(Qwen2Moe())
register_family(Qwen3())
register_family(Qwen3Moe())
register_family(GptOss())
register_family(Gemma2())
register_family(Gemma3())
register_family(Phi3())
register_family(Olmo2())
register_family(Olmo3())
register_family(SmolLM3())
register_family(Granite())
register_family(GraniteHybrid())
register_family(Bamba())
register_family(Mamba2Family())
register_family(Lfm2())
register_family(Qwen35())
register_family(Qwen3Next())
