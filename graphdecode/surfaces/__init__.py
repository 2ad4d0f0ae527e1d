"""Drop-ins for what people use already: TransformerEngine's cache, FlashInfer's attention, optimum-neuron's cache."""
