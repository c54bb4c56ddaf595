#pragma once

namespace mha::detail {

/// What the attention of each architecture is, by the `model_type` of its config.json: a JSON
/// object. A member is a value, or the name of a member of config.json behind a `$`
/// (`"$head_dim"`; `"$a.b|$c|=8"`: b in a, else c, else 8), or a list of cases, of which the
/// first whose `if` holds counts (`[{"if": "$multi_query", "then": 1}]`); null is what is not
/// there.
///
/// - `like`: has the members of that architecture too, where it has none of its own.
/// - `parts`: several attentions, by name; `section`: the member of config.json that is a
///   configuration of its own, and its `model_type` where it says none.
/// - `refuse`, `refuse_if`: why it cannot be computed; the same under a condition.
/// - `layout`, `prefixes`: where the layer lies, `{}` for its number, or that of its group
///   where there are fewer `groups` than layers.
/// - `d_model`, `heads`, `kv_heads`, `head_dim`, `layers`: sizes.
/// - `bias`, `output_bias`, `norm`, `norm_bias`, `norm_eps`, `gate`, `sinks`, `scale`,
///   `softcap`: as in `MultiHeadAttentionOptions`; `scale_of`: its power of -1/2 is the scale.
/// - `norm_scope`, `norm_gain`, `norm_order`: as `qk_norm_scope` and so on; `norm_on`:
/// `rotated`,
///   where only layers that rotate have the norm.
/// - `v_head_dim`, `value_scale`: as in the options; `kv_heads_times_sliding`, `sinks_on`: what
///   sliding layers have more of, or alone.
/// - `temperature_tuning`: an object with the members of `TemperatureTuning`; `temperature_on`:
///   `not_rotated`, where only layers that do not rotate have it.
/// - `rotary_alpha`: that `alpha` beside the type `dynamic` is a fixed NTK factor.
/// - `rotary_original`: the original length, where config.json does not say it.
/// - `rotary`: its pairs; `rotary_dim`, or `rotary_fraction` of a head; `rotary_base`, and
///   `rotary_base_sliding`; `rotary_on`: the layers that rotate, if not all.
/// - `mask`: `causal`, or null; `alibi`: `press` or `mpt`.
/// - `kinds`: the list of the layers' kinds, if it is not `layer_types`. `sliding`: how the
/// kind
///   follows from a layer's number where there is no list; `other`: what a layer is then that
///   is not full.
/// - `chunk`: beside `sliding`: `chunked_where_rotated`, whether such layers attend in chunks.
/// - `window`: how many keys a sliding layer sees, its own and those before; twice that is
///   `window_half_causal`, and `window_half` twice what lies to either side.
///   `window_before`: those before alone, which counts where it is there.
/// - `position_bias`: T5's learned one.
extern const char* const kArchitectures;

}  // namespace mha::detail
