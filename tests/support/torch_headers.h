#pragma once

// The parts of torch/torch.h that the tests use: the whole costs every file 3 seconds more.
#include <torch/csrc/autograd/autograd.h>
#include <torch/cuda.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>
