// The operations of the compiled core, each against a scalar reference, for the target that the compiler's flags say.
#include "conversion_tests.h"
#include "dropout_tests.h"
#include "gemm_tests.h"
#include "job_order_tests.h"
#include "score_tests.h"
#include "vector_tests.h"

int main() {
    vector_tests::run();
    conversion_tests::run();
    dropout_tests::run();
    gemm_tests::run();
    score_tests::run();
    job_order_tests::run();
    return report();
}
