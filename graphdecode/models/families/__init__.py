"""The model families, one module per line of models; those listed here can be loaded."""

from graphdecode.models.families.deepseek import DeepseekV2, DeepseekV3, Glm4MoeLite
from graphdecode.models.families.falcon_h1 import FalconH1
from graphdecode.models.families.gemma import Gemma2, Gemma3
from graphdecode.models.families.gemma4 import Gemma4
from graphdecode.models.families.gpt_oss import GptOss
from graphdecode.models.families.granite import Granite, GraniteHybrid
from graphdecode.models.families.lfm2 import Lfm2
from graphdecode.models.families.llama import Llama
from graphdecode.models.families.llama4 import Llama4
from graphdecode.models.families.mamba2 import Bamba, Mamba2Family
from graphdecode.models.families.mistral import Mistral, Mixtral
from graphdecode.models.families.nemotron_h import NemotronH
from graphdecode.models.families.olmo import Olmo2, Olmo3, OlmoHybrid
from graphdecode.models.families.phi3 import Phi3
from graphdecode.models.families.qwen import Qwen2, Qwen2Moe, Qwen3, Qwen3Moe
from graphdecode.models.families.qwen3_5 import Qwen3Next, Qwen35
from graphdecode.models.families.smollm3 import SmolLM3
from graphdecode.models.family import register_family

for _family in (
    *(Llama, Mistral, Mixtral, Qwen2, Qwen2Moe, Qwen3, Qwen3Moe, GptOss, Gemma2, Gemma3, Gemma4),
    *(Phi3, Olmo2, Olmo3, SmolLM3, Granite, GraniteHybrid, Bamba, Mamba2Family, Lfm2, Qwen35, Qwen3Next),
    *(FalconH1, NemotronH, OlmoHybrid, Llama4, DeepseekV2, DeepseekV3, Glm4MoeLite),
):
    register_family(_family())
