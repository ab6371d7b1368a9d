"""How weights reach sharded cards: the choices of FSDP2, and what `loading` "auto" means.

whole    every card has the whole model before it is sharded: bitsandbytes quantises onto the card
host     every process reads the whole model to the host (with bitsandbytes: device_map={"": "cpu"}), and FSDP2 moves it
         to the card module by module (torch 2.13 _fsdp_init.py, _move_states_to_device)
sharded  rank 0 broadcasts one weight after the other, of which each card keeps its share: cpu_ram_efficient_loading
         (accelerate 1.15 fsdp_utils.py, fsdp2_load_full_state_dict); ZeRO-3 does the same in zero.Init
"""

from __future__ import annotations

from memfit.nouns.job import Loading, Recipe
from memfit.tables.precisions import backend

# whether the base is quantised -> what FSDP2 can do, the usual way first
CHOICES: dict[bool, tuple[Loading, ...]] = {False: ("host", "sharded"), True: ("whole", "host")}
# accelerate 1.15 leaves 4-bit weights out of sharded loading, in the lines quoted
NOT_QUANTISED = (
    "accelerate 1.15 cannot: fsdp_utils.py, fsdp2_prepare_model: "
    "`if fsdp2_plugin.cpu_ram_efficient_loading and not model_has_params4bit`"
)


def choices(recipe: Recipe) -> tuple[Loading, ...]:
    """Return the ways in which the weights of a recipe can be loaded, the usual one first; () if there is no choice."""
    return CHOICES[recipe.method == "qlora"] if backend(recipe) == "fsdp" else ()


def as_read(recipe: Recipe) -> Recipe:
    """Return the recipe of a framework's file with "auto" where cpu_ram_efficient_loading has no effect.

    That is on quantised weights, and under every backend but FSDP2.
    """
    without = recipe.loading != "auto" and (recipe.method == "qlora" or not choices(recipe))
    return recipe.but(loading="auto") if without else recipe


def loading_of(recipe: Recipe) -> Loading:
    """Return the way in which weights are loaded: "auto" is the usual one. Where there is no choice it is "auto"."""
    usual = choices(recipe)
    return "auto" if not usual else usual[0] if recipe.loading == "auto" else recipe.loading
