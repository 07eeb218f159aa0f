use proptest::prelude::*;

use super::*;

type Seats = BTreeMap<ShardId, MemberId>;
type Barred = BTreeMap<MemberId, BTreeSet<ShardId>>;

fn member(name: impl std::fmt::Display) -> MemberId {
    MemberId::new(name.to_string()).unwrap()
}

fn members(count: usize, salt: u64) -> Vec<MemberId> {
    (0..count).map(|nth| member(format_args!("node-{salt:x}-{nth}"))).collect()
}

fn shards(count: usize) -> Vec<ShardId> {
    (0..).take(count).map(ShardId).collect()
}

fn free(shards: &[ShardId], members: &[MemberId], seats: &Seats) -> Seats {
    assign(shards, members, &Barred::new(), seats)
}

fn loads(members: &[MemberId], homes: &Seats) -> Vec<usize> {
    members.iter().map(|member| homes.values().filter(|home| *home == member).count()).collect()
}

fn is_even(members: &[MemberId], homes: &Seats) -> bool {
    let loads = loads(members, homes);
    loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1
}

/// Shards that had a member and have another, or none.
fn moved(before: &Seats, after: &Seats) -> usize {
    before.iter().filter(|(shard, home)| after.get(shard) != Some(home)).count()
}

/// The fewest moves to an even sharing: shards whose member is gone, and what members hold above their share.
fn fewest(count: usize, members: &[MemberId], seats: &Seats) -> usize {
    let mut held = loads(members, seats);
    let lost = seats.len() - held.iter().sum::<usize>();
    held.sort_unstable_by_key(|load| Reverse(*load));
    let (floor, extra) = (count / members.len(), count % members.len());
    let above =
        held.iter().enumerate().map(|(nth, load)| load.saturating_sub(floor + usize::from(nth < extra)));
    lost + above.sum::<usize>()
}

#[test]
fn sixty_four_shards_are_shared_evenly() {
    for count in [1, 2, 3, 5, 8] {
        let members = members(count, 0);
        let homes = free(&shards(64), &members, &Seats::new());
        assert_eq!(homes.len(), 64);
        assert!(is_even(&members, &homes), "{count}: {:?}", loads(&members, &homes));
    }
}

#[test]
fn nobody_gets_nothing_and_no_shards_are_no_trouble() {
    assert!(free(&shards(3), &[], &Seats::new()).is_empty());
    assert!(free(&[], &members(3, 0), &Seats::new()).is_empty());
}

/// The promise of the module's page, over every number of members and shards that is likely.
#[test]
fn a_join_and_a_leave_move_the_fewest_shards() {
    let (mut cases, mut needless) = (0_u32, 0);
    for salt in 0..3 {
        for size in 1..=12 {
            for count in 1..=128 {
                let all = members(size + 1, salt);
                let (shards, few) = (shards(count), &all[..size]);
                let before = free(&shards, few, &Seats::new());
                let joined = free(&shards, &all, &before);
                assert!(is_even(&all, &joined));
                assert_eq!(moved(&before, &joined), count / (size + 1), "{count} over {size} and one more");
                let gone = (count * 7 + size) % all.len();
                let rest: Vec<_> = all.iter().filter(|id| **id != all[gone]).cloned().collect();
                let left = free(&shards, &rest, &joined);
                assert!(is_even(&rest, &left));
                assert_eq!(moved(&joined, &left), loads(&all, &joined)[gone]);
                cases += 2;
                // What a function of the members alone would have done.
                let alone = free(&shards, &all, &Seats::new());
                let allowed = (count / (size + 1)) * 5 / 4;
                needless += u32::from(moved(&before, &alone) > allowed);
            }
        }
    }
    assert!(needless > cases / 4, "without seats {needless} of {cases} move more than 1.25 times the fewest");
}

/// Tries every sharing there is.
#[test]
fn no_even_sharing_moves_fewer() {
    for count in 1..=5_usize {
        for size in 1..=3_usize {
            let (all, shards) = (members(size + 1, 9), shards(count));
            // Any seats at all, the even ones among them; the last member has left.
            for code in 0..(size + 1).pow(u32::try_from(count).unwrap()) {
                let decode = |mut code: usize, size: usize| -> Seats {
                    let digit = |shard: &ShardId| {
                        let place = code % size;
                        code /= size;
                        (*shard, all[place].clone())
                    };
                    shards.iter().map(digit).collect()
                };
                let seats = decode(code, size + 1);
                let now = &all[..size];
                let best = (0..size.pow(u32::try_from(count).unwrap()))
                    .map(|code| decode(code, size))
                    .filter(|homes| is_even(now, homes))
                    .map(|homes| moved(&seats, &homes))
                    .min();
                let got = free(&shards, now, &seats);
                assert!(is_even(now, &got));
                assert_eq!(Some(moved(&seats, &got)), best, "{seats:?}");
                assert_eq!(best, Some(fewest(count, now, &seats)));
            }
        }
    }
}

#[test]
fn a_cold_start_spreads_what_neighbours_in_name_and_number_get() {
    let members = members(4, 1);
    let homes = free(&shards(64), &members, &Seats::new());
    let alike = (1..64).filter(|shard| homes[&ShardId(*shard)] == homes[&ShardId(shard - 1)]).count();
    assert!((4..30).contains(&alike), "{alike}");
}

/// Whoever shares out must come to the same, whichever build it is: the order is a part of the protocol.
#[test]
fn members_of_all_versions_ask_in_the_same_order() {
    let members: Vec<MemberId> = ["a", "b", "c"].map(member).to_vec();
    let orders: Vec<String> = (0..6)
        .map(|shard| {
            order(ShardId(shard), &members).iter().map(MemberId::as_str).collect::<Vec<_>>().concat()
        })
        .collect();
    assert_eq!(orders, ["cab", "cab", "bca", "cab", "abc", "bac"]);
}

/// A case: shards, members, seats of members that are there or not, and what is barred.
fn case(barred: bool) -> impl Strategy<Value = (usize, Vec<MemberId>, Seats, Barred)> {
    (1_usize..60, 1_usize..9, any::<u64>()).prop_flat_map(move |(count, size, salt)| {
        let seats = proptest::collection::vec(proptest::option::weighted(0.8, 0..size + 2), count);
        let odds = if barred { 0.0..0.9 } else { 0.0..1e-9 };
        let bars = odds.prop_flat_map(move |odds| {
            proptest::collection::vec(proptest::bool::weighted(odds), count * size)
        });
        (seats, bars).prop_map(move |(seats, bars)| {
            let all = members(size + 2, salt);
            let seats = seats
                .iter()
                .zip(0..)
                .filter_map(|(seat, shard)| Some((ShardId(shard), all[(*seat)?].clone())));
            let mut barred = Barred::new();
            for (at, _) in bars.iter().enumerate().filter(|(_, bar)| **bar) {
                let shard = ShardId(u32::try_from(at % count).unwrap());
                barred.entry(all[at / count].clone()).or_default().insert(shard);
            }
            (count, all[..size].to_vec(), seats.collect(), barred)
        })
    })
}

proptest! {
    #[test]
    fn the_order_of_what_is_given_does_not_matter(
        (count, members, seats, barred) in case(true),
        turn in any::<prop::sample::Index>(),
    ) {
        let homes = assign(&shards(count), &members, &barred, &seats);
        let (mut shards, mut turned) = (shards(count), members.clone());
        shards.rotate_left(turn.index(count));
        turned.reverse();
        turned.push(members[0].clone());
        prop_assert_eq!(homes, assign(&shards, &turned, &barred, &seats));
    }

    #[test]
    fn shares_are_even_and_moves_the_fewest_whatever_the_seats((count, members, seats, _) in case(false)) {
        let homes = free(&shards(count), &members, &seats);
        prop_assert_eq!(homes.len(), count);
        prop_assert!(is_even(&members, &homes));
        prop_assert_eq!(moved(&seats, &homes), fewest(count, &members, &seats));
    }

    #[test]
    fn the_answer_is_the_same_on_the_way_to_it(
        (count, members, seats, _) in case(false),
        done in any::<u64>(),
    ) {
        let homes = free(&shards(count), &members, &seats);
        let mut midway = seats;
        for (shard, home) in homes.iter().filter(|(shard, _)| mix(done ^ u64::from(shard.0)).is_multiple_of(2)) {
            midway.insert(*shard, home.clone());
        }
        prop_assert_eq!(&free(&shards(count), &members, &midway), &homes);
        prop_assert_eq!(&free(&shards(count), &members, &homes), &homes);
    }

    #[test]
    fn nobody_gets_what_it_is_barred_from((count, members, seats, barred) in case(true)) {
        let homes = assign(&shards(count), &members, &barred, &seats);
        for shard in shards(count) {
            let able: Vec<_> =
                members.iter().filter(|id| !barred.get(id).is_some_and(|no| no.contains(&shard))).collect();
            match homes.get(&shard) {
                Some(home) => prop_assert!(able.contains(&home)),
                None => prop_assert!(able.is_empty()),
            }
        }
        prop_assert_eq!(assign(&shards(count), &members, &barred, &homes), homes, "it does not come to rest");
    }

    #[test]
    fn everybody_can_be_asked_in_turn(size in 1_usize..9, shard in any::<u32>()) {
        let members = members(size, 3);
        let order = order(ShardId(shard), &members);
        prop_assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), size);
        let best = free(&[ShardId(shard)], &members, &Seats::new());
        prop_assert_eq!(best.get(&ShardId(shard)), order.first());
    }
}

/// What the page says of rendezvous hashing with a cap, and no seats. `cargo test -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure_without_seats() {
    let (mut ratios, mut over) = (Vec::new(), 0);
    for salt in 0..20 {
        for size in 1..=12 {
            for count in [8, 16, 32, 64, 96, 128] {
                let all = members(size + 1, salt);
                let shards = shards(count);
                let few = free(&shards, &all[..size], &Seats::new());
                let many = free(&shards, &all, &Seats::new());
                let joins = moved(&few, &many) as f64 / (count / (size + 1)).max(1) as f64;
                let leaves = moved(&many, &few) as f64 / loads(&all, &many)[size].max(1) as f64;
                over += usize::from(joins > 1.25) + usize::from(leaves > 1.25);
                ratios.extend([joins, leaves]);
            }
        }
    }
    ratios.sort_by(f64::total_cmp);
    let at = |percent: usize| ratios[(ratios.len() - 1) * percent / 100];
    println!(
        "median {:.2}, p90 {:.2}, p99 {:.2}, worst {:.2}; above 1.25: {over} of {}",
        at(50),
        at(90),
        at(99),
        at(100),
        ratios.len()
    );
}
