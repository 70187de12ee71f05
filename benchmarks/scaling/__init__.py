"""What labels cost: counted, modelled and measured."""
