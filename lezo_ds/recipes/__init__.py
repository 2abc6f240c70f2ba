"""Configurations that have a name, such as opt-13b-sst2-lezo, for every cell of the paper's tables."""

from lezo_ds.recipes.registry import RECIPES, commented_recipe, list_recipes, load_recipe, recipe_text

__all__ = ["RECIPES", "commented_recipe", "list_recipes", "load_recipe", "recipe_text"]
