// Prints how many floating-point operations a second the cores of this process do in fused multiply-adds, at most:
// of float, then of double. The argument is the number of threads, one for each core.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
// Two units with a latency of four clocks need eight chains; more than twelve do not fit into 16 registers.
constexpr int kChains = 12;
// The best of many short trials, of about a millisecond: other work of the machine falls into long ones.
constexpr long kSteps = 300'000;
constexpr int kTrials = 100;

std::atomic<int> waiting;
volatile double seen;  // so that no result can be left out

template <class T>
void multiply_and_add(T factor, std::chrono::duration<double>* taken) {
    typedef T Vector __attribute__((vector_size(kVectorBytes)));
    Vector sums[kChains];
    for (auto& sum : sums) sum = Vector{} + T(1);
    const Vector scale = Vector{} + factor, term = Vector{} + (T(1) - factor);
    --waiting;
    while (waiting > 0) continue;
    const auto start = std::chrono::steady_clock::now();
    for (long step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
        for (int chain = 0; chain < kChains; ++chain) sums[chain] = sums[chain] * scale + term;
    }
    *taken = std::chrono::steady_clock::now() - start;
    for (const auto& sum : sums) seen = sum[0];
}

template <class T>
double most_operations(int threads) {
    double best = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
        waiting = threads;
        std::vector<std::chrono::duration<double>> taken(threads);
        std::vector<std::thread> running;
        for (auto& each : taken) running.emplace_back(multiply_and_add<T>, T(0.5), &each);
        for (auto& thread : running) thread.join();
        const double all = 2.0 * kVectorBytes / sizeof(T) * kChains * kSteps * threads;
        best = std::max(best, all / std::max_element(taken.begin(), taken.end())->count());
    }
    return best;
}

int main(int, char** arguments) {
    const int threads = std::atoi(arguments[1]);
    std::printf("%g %g\n", most_operations<float>(threads), most_operations<double>(threads));
}
