"""A Keras model on JAX in a training loop of one's own: Keras keeps its variables outside, the step is a function of their values."""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported

import jax
import keras

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import Batches


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state"."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    model: Any = keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(1)])
    optimizer: Any = keras.optimizers.AdamW(1e-2)
    optimizer.build(model.trainable_variables)
    loss_function = keras.losses.MeanSquaredError()

    def init() -> Any:
        held = {"trainable": model.trainable_variables, "rest": model.non_trainable_variables, "opt": optimizer.variables}
        return {name: [variable.value for variable in variables] for name, variables in held.items()}

    def loss_of(trainable: Any, rest: Any, x: Any, y: Any) -> tuple[Any, Any]:
        got, rest = model.stateless_call(trainable, rest, x, training=True)
        return loss_function(y, got), rest

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(state["trainable"], state["rest"], *batch)
        trainable, opt = optimizer.stateless_apply(state["opt"], grads, state["trainable"])
        return {"trainable": trainable, "rest": rest, "opt": opt}, loss

    batches = Batches(16, 4)
    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(init, items={"data": batches})
        state = restored.state
        for step in range(restored.step, config["steps"]):
            state, loss = train_step(state, next(batches))
            manager.save(step + 1, state, items={"data": batches}, metrics={"loss": loss})
            after_save(manager, step + 1, state)
