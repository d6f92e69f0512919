#include "turns.h"

#include "interface.h"
#include "order.h"

namespace emulator {
namespace {

Access last_wait, wait_before;      // for a turn: some threads may still add in the turn before
std::vector<Access> last_addition;  // of each thread

void check_counter(const u32* turns, Site site) {
  Thread& self = *block.current;
  self.site = site;
  if ((unsigned long)turns % sizeof(u32)) fail(self, site, "misaligned counter of turns: %p", (const void*)turns);
}

}  // namespace

void reset_turns() {
  last_wait = wait_before = {};
  last_addition.assign(block.threads.size(), Access{});
}

void check_turn(const Thread& thread, Site site) {
  const Access now = access_by(thread, site);
  if (block.options.in_turn && last_wait.epoch == 0) fail(thread, site, "adds before its turn: nobody has waited for it");
  if (!is_ordered(last_wait, now, thread) && (wait_before.epoch == 0 || !is_ordered(wait_before, now, thread)))
    fail(thread, site, "adds before its turn: nothing orders this behind the wait at %s:%u", file_name(last_wait.site),
         last_wait.site.line);
  last_addition[thread.index] = now;
}

void wait_for_turn(const u32* turns, u32 turn, Site site) {
  check_counter(turns, site);
  const Thread& self = *block.current;
  if (*turns != turn)
    fail(self, site, "waits until %u blocks have had their turn, but all that started before are done, and %u had one",
         turn, *turns);
  wait_before = last_wait;
  last_wait = access_by(self, site);
}

void end_turn(u32* turns, Site site) {
  check_counter(turns, site);
  const Thread& self = *block.current;
  const Access now = access_by(self, site);
  for (const Access& addition : last_addition)
    if (!is_ordered(addition, now, self))
      fail(self, site, "ends the turn too early: nothing orders this behind what thread %u adds at %s:%u",
           (u32)(&addition - last_addition.data()), file_name(addition.site), addition.site.line);
  ++*turns;
}

}  // namespace emulator
