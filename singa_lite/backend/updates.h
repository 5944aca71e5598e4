// SPDX-License-Identifier: Apache-2.0
// The update rules of optimizers, each written once for native/kernels, NVRTC and numpy, as in formulas.h.
//
// Note [updates]: a line is UPDATEn(kernel, [state, its new value,] [...] new value of p[, numbers...])  // what it is
// for n states that the optimizer keeps per parameter. p is the parameter, g its gradient with weight_decay * p added; a
// state stands for its new value in all that follows. Expressions and numbers are as in Note [formulas], but of functions there
// is sqrt alone, no where, A() or Real(): all are computed in the type A. A file that includes this one defines the macros
// first.

UPDATE0(sgd_update, p - lr * g, lr)  // gradient descent
UPDATE1(momentum_update, v, momentum * v + gain * g, p - lr * v, lr, momentum, gain)  // with momentum
UPDATE1(nesterov_update, v, momentum * v + g, p - lr * (g + momentum * v), lr, momentum)  // with Nesterov's momentum

// by a velocity g, which has the momentum in it already; decay * p has a momentum of its own
UPDATE1(velocity_update, w, momentum * w + decay * p, p - lr * (g + w), lr, momentum, decay)  // by a velocity
UPDATE1(nesterov_velocity_update, w, momentum * w + decay * p, p - lr * (g + decay * p + momentum * w), lr, momentum, decay)  // by Nesterov's

// beta_1 = 1 - weight_1, beta_2 = 1 - weight_2, rate = lr / (1 - beta_1^step), correction = 1 / (1 - beta_2^step)
UPDATE2(adam_update, m, (1 - weight_1) * m + weight_1 * g, v, (1 - weight_2) * v + weight_2 * g * g, p - rate * (m / (sqrt(v * correction) + epsilon)), rate, weight_1, weight_2, correction, epsilon)  // Adam
UPDATE2(adamw_update, m, (1 - weight_1) * m + weight_1 * g, v, (1 - weight_2) * v + weight_2 * g * g, keep * p - rate * (m / (sqrt(v * correction) + epsilon)), rate, weight_1, weight_2, correction, epsilon, keep)  // AdamW; keep = 1 - lr * weight decay

UPDATE1(rmsprop_update, s, (1 - weight) * s + weight * g * g, p - lr * (g / sqrt(s + epsilon)), lr, weight, epsilon)  // RMSProp; weight = 1 - rho
UPDATE1(adagrad_update, s, s + g * g, p - lr * (g / sqrt(s + epsilon)), lr, epsilon)  // AdaGrad
