#include "turns.h"

#include "interface.h"
#include "order.h"

namespace emulator {
namespace {

Access last_wait, wait_before;         // for a turn: some threads may still add in the turn before
u32 num_waits, num_ends;               // of turns: they end in the order in which they were waited for
std::vector<Access> last_addition[2];  // of each thread, in turns of even and of odd number
std::vector<bool> has_waited;          // of each thread: for a count

void check_counter(const u32* counter, Site site) {
  Thread& self = *block.current;
  self.site = site;
  if ((unsigned long)counter % sizeof(u32)) fail(self, site, "misaligned counter: %p", (const void*)counter);
}

}  // namespace

void reset_turns() {
  last_wait = wait_before = {};
  num_waits = num_ends = 0;
  for (std::vector<Access>& of_turn : last_addition) of_turn.assign(block.threads.size(), Access{});
  has_waited.assign(block.threads.size(), false);
}

void check_turn(const Thread& thread, Site site) {
  const Access now = access_by(thread, site);
  if (block.options.counted && !has_waited[thread.index]) fail(thread, site, "adds without having waited for a count");
  if (block.options.in_turn && last_wait.epoch == 0)
    fail(thread, site, "adds before its turn: nobody has waited for it");
  const bool in_last = is_ordered(last_wait, now, thread);
  if (!in_last && (wait_before.epoch == 0 || !is_ordered(wait_before, now, thread)))
    fail(thread, site, "adds before its turn: nothing orders this behind the wait at %s:%u", file_name(last_wait.site),
         last_wait.site.line);
  const u32 turn = num_waits == 0 ? 0 : num_waits - 2 + in_last;  // who waits for none is in the first
  last_addition[turn % 2][thread.index] = now;
}

void wait_for_count(const u32* counter, u32 count, Site site) {
  check_counter(counter, site);
  const Thread& self = *block.current;
  if (*counter != count)
    fail(self, site, "waits for a count of %u, but all blocks that started before are done, and it is %u", count,
         *counter);
  has_waited[self.index] = true;
}

void add_to_count(u32* counter, Site site) {
  check_counter(counter, site);
  ++*counter;
}

void wait_for_turn(const u32* turns, u32 turn, Site site) {
  check_counter(turns, site);
  const Thread& self = *block.current;
  if (*turns != turn)
    fail(self, site, "waits until %u blocks have had their turn, but all that started before are done, and %u had one",
         turn, *turns);
  wait_before = last_wait;
  last_wait = access_by(self, site);
  ++num_waits;
}

void end_turn(u32* turns, Site site) {
  check_counter(turns, site);
  const Thread& self = *block.current;
  const Access now = access_by(self, site);
  const std::vector<Access>& additions = last_addition[num_ends++ % 2];
  for (const Access& addition : additions)
    if (!is_ordered(addition, now, self))
      fail(self, site, "ends the turn too early: nothing orders this behind what thread %u adds at %s:%u",
           (u32)(&addition - additions.data()), file_name(addition.site), addition.site.line);
  ++*turns;
}

}  // namespace emulator
