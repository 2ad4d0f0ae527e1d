"""Where models are: a path, an installed package, a folder, the Hugging Face hub.

Nothing here needs torch, so that commands answer a wrong name at once.
"""
