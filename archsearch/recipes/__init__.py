from archsearch.recipes.initial import initial_weights

__all__ = ["initial_weights"]
