"""The models of the zoo: what packages ship, made small by the packages' own arguments, with a sample of what they take.

Nothing in a network is changed. Each module enters the recipes of a field; their order is that of the table.
"""

from zoo_models import diffusion, hugging_face, others, sound, text, vision
from zoo_models.recipe import RECIPES, Recipe

__all__ = ["RECIPES", "Recipe", "diffusion", "hugging_face", "others", "sound", "text", "vision"]
