#include <mha/torch_conversion.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <iostream>
#include <string>

// What torch::nn::MultiheadAttention does silently, each shown beside mha with the same
// weights. The exit code is 0 if the README still says the truth about both.
namespace {

int failures = 0;

void show(const std::string& what, const std::string& builtin, const std::string& ours,
          bool as_described) {
  std::cout << what << "\n  built-in: " << builtin << "\n  mha:      " << ours << '\n';
  if (!as_described) {
    std::cout << "  NOT AS DESCRIBED\n";
    ++failures;
  }
}

bool throws(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

}  // namespace

int main() {
  torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  mha::MultiHeadAttention ours(4, 2);
  auto builtin = mha::to_torch(ours);

  {
    auto x = torch::randn({2, 3, 4}), changed = x.clone();
    changed[1] += 1;  // sample 1, batch first
    const bool theirs_moved =
        !torch::equal(std::get<0>(builtin->forward(x, x, x))[0],
                      std::get<0>(builtin->forward(changed, changed, changed))[0]);
    const bool ours_moved =
        !torch::equal(ours->forward(x).output[0], ours->forward(changed).output[0]);
    show("(N, T, E) given, sample 1 changed",
         theirs_moved ? "sample 0's output changes" : "fine",
         ours_moved ? "sample 0's output changes" : "sample 0's output stays",
         theirs_moved && !ours_moved);
  }

  auto x = torch::randn({3, 1, 4});  // sequence first, as the built-in wants it
  auto batch_first = x.transpose(0, 1);
  {
    auto later = torch::ones({3, 3}, torch::kBool).triu(1);
    auto theirs = std::get<1>(builtin->forward(x, x, x, {}, true, later, false));
    auto weights = ours->forward(batch_first, {}, {}, mha::Mask::block(later)).weights;
    const float seen = theirs[0][0][0][2].item<float>(),
                blocked = weights[0][0][0][2].item<float>();
    show("bool mask: may query 0 see key 2?",
         seen > 0 ? "yes, true only adds 1 to the score" : "no", blocked == 0 ? "no" : "yes",
         seen > 0 && blocked == 0);
  }
  {
    auto padding = torch::ones({1, 3}, torch::kBool);
    auto theirs = std::get<0>(builtin->forward(x, x, x, padding));
    auto output = ours->forward(batch_first, {}, {}, mha::Mask::block_keys(padding)).output;
    const bool is_bias = torch::allclose(output[0][0], ours->W_o->bias);
    show("a query without any key", theirs.isnan().all().item<bool>() ? "NaN" : "a number",
         is_bias ? "attention 0: the output projection's bias" : "something else",
         theirs.isnan().all().item<bool>() && is_bias);
  }
  {
    auto none = torch::zeros({3, 0, 4});
    const bool theirs = throws([&] { builtin->forward(none, none, none); });
    const bool mine = throws([&] { ours->forward(none.transpose(0, 1)); });
    show("an empty batch", theirs ? "throws" : "works", mine ? "throws" : "works",
         theirs && !mine);
  }
  {
    std::string message;
    try {
      ours->forward(torch::zeros({3, 5, 4}), torch::zeros({4, 5, 4}), torch::zeros({4, 5, 4}));
    } catch (const c10::Error& error) {
      message = error.what_without_backtrace();
    }
    auto q = torch::zeros({5, 2, 4}), kv = torch::zeros({5, 4, 4});
    const bool theirs = throws([&] { builtin->forward(q, kv, kv); });
    show("query of 2 samples, key and value of 4",
         theirs ? "throws" : "an output, with samples mixed", "error: " + message,
         !theirs && message.find("batch size") != std::string::npos);
  }
  return failures;
}
