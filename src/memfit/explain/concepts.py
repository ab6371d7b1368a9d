"""The words of the field by what they mean: the concepts that signs are put together from, as regular expressions."""

from __future__ import annotations

# ---- what runs ------------------------------------------------------------------------------------------------------

FSDP = r"fsdp|fully_shard|fully[- ]sharded"
ZERO3 = r"zero[-_ /]?(?:stage)?[-_ ]?3|zero\W+stage\W+3|\"stage\": 3|stage[- ]?3|deepspeed stage 3|ds_?z3"
ZERO12 = r"zero[-_ /]?(?:stage)?[-_ ]?[12]\b|stage\W{1,3}[12]\b|ds_?z[12]"
MANY = (
    r"\bddp\b|distributed|torchrun|horovod|multi[- ]?gpu|accelerate launch|num_processes|local_rank|world_size|\branks?\b|"
    r"\b(?:[2-9]|[1-9]\d+) ?(?:x (?!\d)|gpus|cards|ranks|process)"
)
EACH = r"(?:each|every|per|all|both|any) (?:of the )?(?:\d+ )?(?:single )?(?:\w+ )?(?:gpus?|ranks?|process\w*|cards?|devices?|workers?)"
ONE_CARD = r"\bgpu[- ]?#?0\b|cuda:0|cuda 0|device 0|first (?:gpu|card|device)|same (?:gpu|card|device)|one (?:gpu|card)\b|gpu:0|rank[- ]?0"
WHOLE = r"full|whole|entire|complete|cop(?:y|ies)|replica|duplicat|all (?:the )?(?:param|weights)"
FOUR_BIT = r"4[- ]?bit|qlora|nf4|\bbnb|bitsandbytes|quantization_config|int4|\bhqq\b"
QUANTIZED = r"fp8|mxfp4|nvfp4|gptq|\bawq\b|int8|8[- ]?bit|pre-?quanti[sz]ed|quanti[sz]ed (?:checkpoint|model|weights)"
ADAPTER = r"peft|lora|adapter"
DIFFUSION = (
    r"diffus|\bflux|\bsd(?:xl?|3|15)?\b|dreambooth|\bvae\b|text[_ ]?encoder|\bt5\b|\bunet\b|\bwan ?2|hunyuan|"
    r"cogvideo|\bltx|controlnet|qwen[- ]?image|z-?image|pixart|kandinsky|auraflow|\bsana\b|kolors|hidream|mochi|"
    r"musubi|kohya|onetrainer|simpletuner|ai-toolkit"
)
PREFERENCE = r"\bdpo|\borpo\b|\bkto\b|\bcpo\b|\bsimpo\b|concatenated_forward"
ROLLOUTS = r"\bgrpo|\brloo|\bgspo|\bdapo"
RL = rf"{ROLLOUTS}|\bppo\b|\bverl\b|openrlhf|skyrl|nemo[- ]?rl|\brlhf\b|reinforce"
ENGINE = (
    r"(?<![\w-])vllm(?!-project)|(?<!/)\bsglang|gpu_memory_utilization|cache blocks|warming up sampler|sleep_mode|"
    r"lmdeploy|tensorrt[- ]?llm|mem_fraction_static|max_num_seqs|free_cache_engine|use_vllm|engine_core|llm_engine"
)
CONVOLUTIONS = r"\bresnet|torchvision/models|batch_?norm\(|\bconv[123]d\b|densenet|mobilenet|efficientnet|\bvgg"  # images without tokens
IMAGES = r"image|\bvision\b|\bvl\b|llava|video|pixel|screenshot|visual"

# losses over classes, and those whose classes are the words of a vocabulary
LOSSES = (
    r"cross[_-]?entropy|nll_loss|log_softmax|masked_?ce\b|logits\.float\(|logits\.to\(torch\.float32|convert_(?:outputs_)?to_fp32|"
    r"tensor\.float\(\)|shift_logits|entropy_from_logits|logprobs_from_logits|logsumexp|causallmloss|parallel_cross|"
    r"log_probs_from_logits|gather_log_prob|generalized_jsd|token_logprobs"
)
CAUSAL = (
    r"causallm|lm[_ -]?head|vocab|shift_logits|next[_ -]token|unembed|(?:sft|dpo|grpo|kto|orpo|gkd)_?trainer|language model|"
    r"(?:view|reshape)\(-1, ?\w*logits|logprobs?_from_logits|parallel_cross|llama|qwen|mistral|mixtral|gemma|\bphi-?\d|deepseek|\bgpt|falcon|bloom|\bopt-"
)

# ---- what is done ---------------------------------------------------------------------------------------------------

EVALUATION = r"\beval|validat|(?<!_)\btest (?:set|loop|epoch)|\bval\b"
GENERATION = r"predict_with_generate|generat(?:e|es|ed|ing|ion)\b|num_beams|beam search|max_new_tokens"
OPTIMIZER = r"optimi[sz]er|\boptim\b|\badam\w*|\bsgd\b|adafactor|prodigy|\blion\b|\bmoments?\b|\bmomentum|exp_avg"
LOADING = (
    r"(?<!off)(?<!up)(?<!down)load(?!er)|from_pretrained|start-?up|materiali[sz]e|state_dict_into|checkpoint shards"
)
AS_IT_COMES = r"(?:[\W_]{1,60}500,?000,?000|\W{1,4}auto)\b"  # DeepSpeed's default, as it prints it in every run
# what an optimizer keeps of each weight
STATES = (
    r"exp_avg|\bmoments?\b|momentum|variance|optim(?:i[sz]er)?[ _]states?|adam[ _]states?|\bqmap|master (?:weights|cop|param)|fp32_from|"
    r"fp32_groups|single_partition_of_fp32|state_steps|second[- ]order"
)
# clipping as code and in words: the settings (max_grad_norm, gradient_clipping) and a log's grad_norm are in every run
CLIP = (
    r"clip_grad_|clip_by_\w*norm|clip_coef|unscale_(?:and_clip_)?grads|multi_tensor_l2norm|foreach_norm|"
    r"grad(?:ient)?s?[ -](?:norm )?clip\w*|clip\w* (?:of )?(?:the )?grad"
)
UPCAST = r"up-?cast|cast\w*|convert\w*|turn\w*|kept|keeps?|\bin\b|\bto\b|\bas\b"
FP32 = r"fp32|float[_ ]?32|32[- ]?bits?\b|full[- ]precision|single[- ]precision|\.float\(\)|\bf32\b"
WITHOUT = r"without|\bno\b|\bnot\b|forgot|missing|never|isn't|aren't|unset|instead of"
HELPS = r"help|fix|solv|work(?:s|ed)\b|avoid|resolv|drop|reduc|-+>|\bto [\d.]+ ?gi?b|got rid"

# ---- how it goes ----------------------------------------------------------------------------------------------------

_UP = (
    r"(?:(?<!sudden )(?:grow|climb|creep|increas|ris(?:e|es|ing)\b)|(?<!gradient[_ -])accumulat|piles? up|builds? up|"
    r"(?:go(?:es|ing)?|fill(?:s|ing)?) up|fills\b|more and more|upward trend|上涨|增长)"
)
GROWS = (
    rf"(?:memory|usage|used|vram|ram|allocated|it|gpu|consumption)\b\W+(?:[\w.]+\W+){{0,5}}?{_UP}|"
    rf"(?:slow|stead|gradual|constant|continu|monoton|linear|keeps?|kept|keep on|always)\w*,?(?: \w+){{0,2}} {_UP}|"
    rf"{_UP}\w*,? (?:\w+ ){{0,3}}(?:until|till|each|every|per|over|with|by|through|steadily|slowly|linearly|gradually)\b|\bgrow(?:s|ing)\b"
)
SHAPES = (
    r"(?:different|var(?:y|ying|iable|ied|ies)|dynamic|changing|random|multiple)[ -](?:\w+ ){0,2}(?:shapes?|sizes?|lengths?|resolutions?)|"
    r"multi-?scale|bucketing"
)
# one card that holds more than its neighbours
_FULLER = r"more|twice|double|\dx|2 ?times|much|higher|fuller|larger|bigger|exceeds|skewed|than (?:the )?(?:other|rest)"
UNEVEN = (
    rf"(?:{ONE_CARD}|main gpu|master gpu)\W+(?:\w+\W+){{0,5}}?(?:{_FULLER})\b.{{0,40}}\b(?:others?|rest|second|gpu ?\d|each)|"
    rf"[\d.]+ ?[gm]i?b\w* (?:\w+ ){{0,2}}(?:on|in|of) (?:the )?(?:{ONE_CARD}).{{0,30}}[\d.]+ ?[gm]i?b\w* (?:\w+ ){{0,2}}(?:on|in) (?:the )?(?:other|rest)|"
    rf"(?:{ONE_CARD}) (?:only )?(?:has|with) (?:only )?[\d.]+ ?g\w* (?:usable|free|left|available)|"
    r"imbalanc|unbalanc|uneven|not (?:evenly|balanced)|only (?:the )?(?:first|one) (?:gpu|card)"
)
LATER = (
    r"random(?:ly)?\b|sporadic|intermittent|occasional|sometimes|unpredictabl|\blate(?:r)? (?:oom|in training)|"
    r"(?:at|after) (?:about |around |~ ?)?(?:\d+ )?(?:hours?|several|various|some|many|a few|a while|thousands|hundreds)|"
    r"mid[- ]?(?:run|training|epoch)|mid(?:dle|way)\b|in the (?:second|2nd|third) ?epoch|"
    r"(?:oom|memory|crash\w*|fail\w*) (?:\w+ )?(?:at|after|on|around) (?:about |around |~ ?)?(?:step |iteration |iter |update |batch )?#?\d[\d,.]+k?\+?"
)
RESERVED = r"reserved(?! (?:in total|by pytorch|but[ -]unalloc))"  # said by somebody, not by the message itself
SUDDEN = r"sudden|abrupt|\bjump|all at once|out of nowhere"
LONGEST = (
    r"group_by_length|lengthgrouped|longest|very long|too long|max[-_ ]?duration|long audio|utterance|"
    r"(?:a|one|few|some|certain|single|rare|several) (?:\w+ ){0,2}(?:long(?:er)?|large|huge|big)\b|"
    r"long(?:er)? (?:sample|batch|example|sequence|row|document|prompt|text)|outlier|sequence length (?:var|was|is|differ)|length (?:varies|distribution)|"
    r"un(?:limited|bounded|truncated)|(?:no|without|not) (?:\w+ )?truncat|truncation\W{1,3}(?:false|none|off)|"
    r"is longer than the specified maximum|over-?long|long[- ]tail|variable[- ]length batch|"
    r"\d+k?[- ]tokens? (?:sample|example|sequence|row)|[\d.]+ ?(?:-|to) ?\d+ ?s(?:ec\w*)?\b"
)
