// cp.async: copies arrive when they are waited for and not before. A thread waits for its own copies; others see them
// after a barrier.
#pragma once

namespace emulate {

void cp_async(void* to, const void* from, int bytes, bool valid);
void cp_async_commit();
void cp_async_wait(int pending);

}  // namespace emulate
