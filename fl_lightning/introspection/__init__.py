"""Facts read from classes and objects: arguments, accepted values, hooks' parameters, papers."""
