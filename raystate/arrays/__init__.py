"""The JAX side: flatten a state, who owns which piece of it, device -> slot, slot or storage -> device."""
