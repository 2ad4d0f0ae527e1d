"""`MultiheadAttention` and `TransformerLayer`, with TransformerEngine's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from graphdecode.buffers import default_device
from graphdecode.cache.errors import require_positive_numbers, require_share

from .arguments import require_neutral
from .dot_product_attention import DotProductAttention, require_eval
from .inference_params import InferenceParams
from .projections import Initializers, LayerNormMLP, LayerNormQKV, NormSettings, QKVLayout, StandaloneNorm, frozen
from .rotary import apply_rotary_pos_emb

# arguments of `forward` that layers pass on to `DotProductAttention`
_OF_ATTENTION = (
    *("attention_mask", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("attn_mask_type", "window_size", "bottom_right_diagonal", "softcap", "core_attention_bias_type"),
    *("core_attention_bias", "alibi_slopes", "pad_between_seqs"),
)


class MultiheadAttention(nn.Module):
    """Attention with its projections: `qkv` or, with a norm before it, `layernorm_qkv`; and `proj`.

    Parameters have TransformerEngine's names (`query_weight`, ...), and need no gradients. Arguments that
    `DotProductAttention` has too mean the same. Those that are not listed here are hints, or must be neutral; see
    `arguments.NEUTRAL`.

    Args:
        hidden_size: size of input and output.
        kv_channels: size of a head; None: hidden_size / num_attention_heads.
        init_method: fills the weights of queries, keys and values in place; None: normal, standard deviation 0.023.
        output_layer_init_method: likewise that of `proj`.
        get_rng_state_tracker: returns an object whose `fork()` is a context; weights are filled within it.
        params_dtype: None means torch's default.
        return_bias: whether the bias of `proj` is returned in place of being added.
        return_layernorm_output: whether the norm's output is returned, too.
        input_layernorm: whether there is a norm.
        fuse_qkv_params: whether queries, keys and values have one `weight` and one `bias`.
        qkv_weight_interleaved: whether these have the heads of each group together: its queries, its key, its value;
            else all queries, all keys, all values.
        zero_centered_gamma: whether the norm multiplies by 1 + weight.
        rotary_pos_interleaved: whether rotated pairs are adjacent.
        bias: whether projections have biases.
        normalization: `LayerNorm` or `RMSNorm`.
        device: None means CUDA where there is one, else the CPU.
        qk_norm_type: norm of each head of queries and keys: None, `L2Normalization`, or `RMSNorm` or `LayerNorm` with
            the parameters of `q_norm` and `k_norm`.
        qk_norm_eps: added to what that takes the root of.
        qk_norm_before_rope: whether it stands before the rotation.

    Raises:
        ValueError: the sizes do not divide, or an option is not known, or asks for what is not offered.
    """

    def __init__(
        self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None,
        attention_dropout: float = 0.1, layernorm_epsilon: float = 1e-5,
        init_method: Callable[[Tensor], object] | None = None,
        output_layer_init_method: Callable[[Tensor], object] | None = None, layer_number: int | None = None,
        attn_mask_type: str = "causal", window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None, softcap: float = 0.0, tp_group: object = None, tp_size: int = 1,
        num_gqa_groups: int | None = None, fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None, sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None, return_bias: bool = False, return_layernorm_output: bool = False,
        input_layernorm: bool = False, attention_type: str = "self", set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False, zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False, ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, bias: bool = True,
        normalization: str = "LayerNorm", device: torch.device | str | None = None, qkv_format: str = "sbhd",
        name: str | None = None, qk_norm_type: str | None = None, qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False, seq_length: int | None = None, micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:  # fmt: skip
        require_neutral(locals())
        super().__init__()
        init = Initializers(init_method, output_layer_init_method, get_rng_state_tracker)
        init.check()
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size={hidden_size} must be a multiple of num_attention_heads={num_attention_heads}"
            )
        self.layer_number = 1 if layer_number is None else layer_number
        self.qkv_format = qkv_format
        self.kv_channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output and input_layernorm
        target_device = default_device(device)
        like = {"dtype": params_dtype or torch.get_default_dtype(), "device": target_device}
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        inner = num_attention_heads * self.kv_channels
        self.core_attention = DotProductAttention(
            num_attention_heads, self.kv_channels, groups, attention_dropout, qkv_format, attn_mask_type, window_size,
            bottom_right_diagonal, softcap, layer_number=self.layer_number, softmax_type=softmax_type,
        ).to(target_device)  # fmt: skip
        require_positive_numbers(layernorm_epsilon=layernorm_epsilon, qk_norm_eps=qk_norm_eps)
        norm = normalization if input_layernorm else None
        settings = NormSettings(hidden_size, layernorm_epsilon, norm, zero_centered_gamma, bias, like, init)
        heads = QKVLayout(num_attention_heads, groups, self.kv_channels, fuse_qkv_params, qkv_weight_interleaved)
        self.qkv_name = "layernorm_qkv" if input_layernorm else "qkv"
        self.add_module(self.qkv_name, LayerNormQKV(settings, heads))
        self.q_norm = self.k_norm = None
        if qk_norm_type is not None:
            settings_of_heads = ("qk_norm_type", qk_norm_type, self.kv_channels, qk_norm_eps, like)
            self.q_norm, self.k_norm = (StandaloneNorm(*settings_of_heads) for _ in "qk")
        self.proj = nn.Linear(inner, hidden_size, bias=False, device="meta")
        self.proj.weight = init.weight(hidden_size, inner, like=like, is_outer=True)
        self.proj.register_parameter("bias", frozen(hidden_size, value=0.0, like=like) if bias else None)
        self.eval()

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None, window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None, is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False, inference_params: InferenceParams | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None, core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None, thd_attention_policies: object = None,
        thd_attention_policy_dispatch: str = "auto", softcap: float | None = None,
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Attend from the step's tokens; a layer that the cache does not know gets its memory here.

        Args:
            hidden_states: [s, b, hidden], [b, s, hidden] or [t, hidden], as the output.
            inference_params: the cache, after its `pre_step`.
            rotary_pos_emb: angles [s2, 1, 1, d2], or a pair for queries and keys; tokens are rotated to the positions
                from `get_seqlens_pre_step` on.
            others: see `DotProductAttention.forward`.

        Returns:
            The output; with `return_bias` that without the bias of `proj`, and the bias; with `return_layernorm_output`
            also what the norm made of `hidden_states`.
        """
        require_neutral(arguments := locals())
        if inference_params is not None and self.layer_number not in inference_params.cache_manager.cache:
            inference_params.allocate_memory(self.layer_number)
        qkv = getattr(self, self.qkv_name)
        normed = qkv.normalize(hidden_states)
        query, key, value = qkv(hidden_states, normed)
        if self.qk_norm_before_rope:
            query, key = self._normed(query, key)
        if rotary_pos_emb is not None:
            begins = cu_seqlens_q if cu_seqlens_q_padded is None or pad_between_seqs is False else cu_seqlens_q_padded
            query, key = self._rotated(query, key, rotary_pos_emb, inference_params, begins)
        if not self.qk_norm_before_rope:
            query, key = self._normed(query, key)
        options = {name: arguments[name] for name in _OF_ATTENTION}
        out = self.core_attention(query, key, value, inference_params=inference_params, **options)
        results = [self.proj(out)]
        if self.return_bias:
            bias = self.proj.bias
            results = [linear(out, self.proj.weight), out.new_empty(0) if bias is None else bias]
        if self.return_layernorm_output:
            results.append(normed)
        return results[0] if len(results) == 1 else tuple(results)

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def _rotated(
        self,
        query: Tensor,
        key: Tensor,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor],
        inference_params: InferenceParams | None,
        begins: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys at their positions, given where rows begin in thd without a cache."""
        pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        starts = None
        if inference_params is not None:
            starts, begins = inference_params.get_seqlens_pre_step(), inference_params.cu_seqlens_q
            longest = inference_params.max_sequence_length
        else:  # the lengths of thd's rows are on the device
            longest = query.shape[self.qkv_format.index("s")] if "s" in self.qkv_format else 0
        if (num_angles := min(len(angles) for angles in pair)) < longest:
            raise ValueError(f"rotary_pos_emb must have the angles of {longest} positions, got {num_angles}")
        layout = (self.qkv_format, starts, self.rotary_pos_interleaved, False, begins)
        return apply_rotary_pos_emb(query, pair[0], *layout), apply_rotary_pos_emb(key, pair[1], *layout)


class TransformerLayer(nn.Module):
    """A decoder layer: `self_attention` and `layernorm_mlp`, each with a norm before it.

    Arguments that `MultiheadAttention` has too mean the same.

    Args:
        ffn_hidden_size: size of the perceptron's inner layer.
        hidden_dropout: must be 0 in training mode, as `attention_dropout`.
        init_method: fills the perceptron's first weight, too.
        output_layer_init_method: fills its second, too.
        activation: one of `projections.ACTIVATIONS`.
        activation_params: of `clamped_swiglu`: `limit`, `alpha`, `glu_linear_offset`.
        apply_residual_connection_post_layernorm: whether residual connections begin behind the norms.
        output_layernorm: whether the norm of attention's input stands at the layer's end instead, as `layernorm`.
        parallel_attention_mlp: whether attention and perceptron have the same input; excludes the two before.
        self_attn_mask_type: see `DotProductAttention`.
        attn_input_format: `sbhd`, `bshd` or `thd`.

    Raises:
        ValueError: the sizes do not divide, or an option is not known, or asks for what is not offered.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1, attention_dropout: float = 0.1,
        init_method: Callable[[Tensor], object] | None = None,
        output_layer_init_method: Callable[[Tensor], object] | None = None, layer_number: int | None = None,
        kv_channels: int | None = None, self_attn_mask_type: str = "causal", window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None, softcap: float = 0.0, enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None, enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: object = None, tp_size: int = 1, params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None, fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None, micro_batch_size: int | None = None, sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False, output_layernorm: bool = False,
        parallel_attention_mlp: bool = False, layer_type: str = "encoder", drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False, fuse_qkv_params: bool = False, rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True, ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True, ub_overlap_rs: bool = True, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True, ub_bulk_wgrad: bool = True, bias: bool = True, activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None, normalization: str = "LayerNorm",
        device: torch.device | str | None = None, attn_input_format: str = "sbhd", name: str | None = None,
        qk_norm_type: str | None = None, qk_norm_eps: float = 1e-6, qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:  # fmt: skip
        require_neutral(locals())
        super().__init__()
        if parallel_attention_mlp and (apply_residual_connection_post_layernorm or output_layernorm):
            raise ValueError(
                "parallel_attention_mlp excludes apply_residual_connection_post_layernorm and output_layernorm, got "
                f"{apply_residual_connection_post_layernorm} and {output_layernorm}"
            )
        require_share(hidden_dropout=hidden_dropout)
        self.hidden_dropout = hidden_dropout
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.output_layernorm, self.parallel_attention_mlp = output_layernorm, parallel_attention_mlp
        self.self_attention = MultiheadAttention(
            *(hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon),
            *(init_method, output_layer_init_method, layer_number, self_attn_mask_type, window_size),
            *(bottom_right_diagonal, softcap),
            num_gqa_groups=num_gqa_groups, get_rng_state_tracker=get_rng_state_tracker, params_dtype=params_dtype,
            return_layernorm_output=apply_residual_connection_post_layernorm, input_layernorm=not output_layernorm,
            fuse_qkv_params=fuse_qkv_params, zero_centered_gamma=zero_centered_gamma,
            qkv_weight_interleaved=qkv_weight_interleaved, rotary_pos_interleaved=rotary_pos_interleaved, bias=bias,
            normalization=normalization, device=device, qkv_format=attn_input_format, qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps, qk_norm_before_rope=qk_norm_before_rope, softmax_type=softmax_type,
        )  # fmt: skip
        weight = self.self_attention.proj.weight
        like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        init = Initializers(init_method, output_layer_init_method, get_rng_state_tracker)
        norm = NormSettings(hidden_size, layernorm_epsilon, normalization, zero_centered_gamma, bias, like, init)
        self.layernorm_mlp = LayerNormMLP(norm, ffn_hidden_size, activation, activation_params)
        if output_layernorm:
            of_layer = ("normalization", normalization, hidden_size, layernorm_epsilon, like)
            self.layernorm = StandaloneNorm(*of_layer, zero_centered=zero_centered_gamma)
        self.eval()

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None, enc_dec_attn_mask: Tensor | None = None,
        enc_dec_attn_mask_type: str | None = None, enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None, is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False, inference_params: InferenceParams | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None, core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None, thd_attention_policies: object = None,
        thd_attention_policy_dispatch: str = "auto", softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the layer's output for the step's tokens, in the shape of the input.

        The arguments are those of `MultiheadAttention.forward`; `self_attn_mask_type` and `window_size` None mean the
        layer's. As published, keys have the queries' lengths: `cu_seqlens_kv` has no effect.
        """
        require_neutral(arguments := locals())
        require_eval(self, hidden_dropout=self.hidden_dropout)
        options = {name: arguments[name] for name in _OF_ATTENTION if name not in ("attn_mask_type", "cu_seqlens_kv")}
        attended = self.self_attention(
            hidden_states, attn_mask_type=self_attn_mask_type, inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb, **options,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            return hidden_states + (attended + self.layernorm_mlp(hidden_states))
        attended, residual = attended if isinstance(attended, tuple) else (attended, hidden_states)
        hidden_states = residual + attended
        normed = self.layernorm_mlp.normalize(hidden_states)
        residual = normed if self.apply_residual_connection_post_layernorm else hidden_states
        out = residual + self.layernorm_mlp(hidden_states, normed)
        return self.layernorm(out) if self.output_layernorm else out
