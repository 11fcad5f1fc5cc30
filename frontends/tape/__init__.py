"""The tape: hooks on the layers of a model that turn one backward into the leaves of its examples."""
